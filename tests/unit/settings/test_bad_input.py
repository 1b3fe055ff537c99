"""Whatever stands in the files: a plan, or one sentence with the place. Never anything else."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.errors import SettingsError
from agent.core.state.last_good import SourceFile
from agent.settings.sections import build
from agent.settings.sources import NodeFacts, Sources
from agent.settings.values import make_plan

FILES = {
    "device_config": b"""nvidia:
  deviceSplitCount: 4
  deviceMemoryScaling: 1.5
  libCudaLogLevel: 3
  migProfileAllowlist:
    - models: [A30]
      profiles: [1g.6gb]
""",
    "own": b"""sharing:
  splitCount: 4
  filterIndexes: [0, 3]
profiles:
  - name: big
    match: {nodes: ["a*"], labels: "x in (a, b)"}
    library: {corePolicy: force}
""",
    "node_config": b"""{"nodeconfig": [{"name": "a", "devicesplitcount": 5,
  "filterdevices": {"uuid": ["GPU-1"], "index": [0]}}]}""",
}
KINDS = st.sampled_from(sorted(FILES))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=5),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=5), one, max_size=3),
    max_leaves=5,
)
FACTS = NodeFacts("a", {"x": "a"}, frozenset({"0"}))


def settings_or_sentence(kind: str, content: bytes) -> str:
    try:
        plan = make_plan(Sources(**{kind: SourceFile("file", content)}))  # type: ignore[arg-type]
        build(plan.resolve(FACTS), host_name="a")
    except SettingsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", FILES)
def test_the_whole_file_is_fine(kind: str):
    assert "" == settings_or_sentence(kind, FILES[kind])


@pytest.mark.parametrize("kind", FILES)
def test_a_half_written_file_is_taken_or_refused_with_its_place(kind: str):
    for size in range(len(FILES[kind])):
        sentence = settings_or_sentence(kind, FILES[kind][:size])
        assert not sentence or sentence.startswith("file:")


@given(KINDS, st.data())
@settings(deadline=None)
def test_a_file_with_a_damaged_byte_is_taken_or_refused_with_its_place(kind: str, data):
    content = bytearray(FILES[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    sentence = settings_or_sentence(kind, bytes(content))
    assert not sentence or sentence.startswith("file:")


@given(VALUES, st.sampled_from(["sharing", "profiles", "library", "web", "x"]))
@settings(deadline=None)
def test_any_value_of_a_section_of_our_own_file_is_taken_or_refused(value: object, key: str):
    text = json.dumps({key: value})
    sentence = settings_or_sentence("own", text.encode(errors="replace"))
    assert not sentence or sentence.startswith("file:")


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("junk", [b"\x00", b"\xff", b"[", b"{", b"- ", b"a", b"&a ", b'"', b"\t"])
def test_much_of_one_byte_is_refused_and_soon(kind: str, junk: bytes):
    assert settings_or_sentence(kind, junk * (200_000 // len(junk))).startswith("file:")


TAGGED = ["!!bool maybe", "!!int ''", "!!int [1]", "!!float ''", "!!timestamp x", "!!str [a]"]


@pytest.mark.parametrize("value", TAGGED)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("device_config", "nvidia: {{deviceSplitCount: {0}, libCudaLogLevel: {0}}}"),
        ("own", "sharing: {{splitCount: {0}}}"),
        ("own", "profiles: [{{name: {0}, match: {{nodes: [a]}}}}]"),
    ],
)
def test_a_tag_that_does_not_fit_its_value_is_refused_with_its_place(kind: str, text: str, value):
    assert settings_or_sentence(kind, text.format(value).encode()).startswith("file:")
