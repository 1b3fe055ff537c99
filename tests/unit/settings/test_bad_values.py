"""What no setting can be is refused with its place, whichever reader meets it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.errors import SettingsError
from agent.settings.sections import build
from agent.settings.sources import NodeFacts
from agent.settings.table import FIELDS
from tests.unit.settings.plans import plan_of

GREAT = "1" + 309 * "0"
HUGE = "0x" + 5000 * "f"
CLOCK = ":".join(200 * ["1"]) + ".5"
"""YAML 1.1's sixties: a whole number that no float holds, and a half."""

PLACES = ("c.yaml:", "d.yaml:", "n.json:", "env ", "--")
FACTS = NodeFacts("a", {"x": "a"}, frozenset({"0"}))


def refusal(**sources: object) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        plan_of(**sources)  # type: ignore[arg-type]
    return caught.value


def taken_or_refused(**sources: object) -> None:
    """Anything but a SettingsError with its place is let through."""
    try:
        plan = plan_of(**sources)  # type: ignore[arg-type]
        build(plan.resolve(FACTS), host_name="a")
    except SettingsError as error:
        str(error).encode()
        assert str(error).startswith(PLACES)  # noqa: PT017 -- many are taken


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize("key", ["devicememoryscaling", "devicecorescaling"])
def test_a_number_that_no_float_holds_is_refused_with_its_place_in_hamis_json(key: str, sign: str):
    error = refusal(nodes=f'{{"nodeconfig":[{{"name":"a","{key}":{sign}{GREAT}}}]}}')

    assert str(error).startswith(f"n.json:1:{31 + len(key)}: nodeconfig[0].{key}: a number")


def test_a_number_of_more_digits_than_python_reads_is_refused_with_its_place():
    error = refusal(nodes=f'{{"nodeconfig":[\n{{"name":"a","devicesplitcount":{5000 * "1"}}}]}}')

    assert str(error).startswith("n.json:2:32: ")


@pytest.mark.parametrize("value", [HUGE, f"-{HUGE}", CLOCK, "0" + 9000 * "7", 5000 * "9"])
def test_a_number_beyond_all_bounds_is_refused_with_its_place_in_our_own_file(value: str):
    for key in {one.key for one in FIELDS if "." in one.key} - {"library.cudaLogLevel"}:
        section, name = key.split(".")
        for written in (value, f"[{value}]"):
            error = refusal(own=f"{section}: {{{name}: {written}}}")
            assert str(error).startswith(f"c.yaml:1:{len(key) + 5}: ")


def test_a_log_level_beyond_all_bounds_is_refused_with_its_place():
    assert str(refusal(own=f"library: {{cudaLogLevel: {HUGE}}}")).startswith(
        "c.yaml:1:25: library.cudaLogLevel: expected text in quotes, found `0xffff"
    )


TEXT_FIELDS = [
    ("env NODE_NAME", {"environ": {"NODE_NAME": "a\udcff"}}),
    ("env CONFIG_FILE", {"environ": {"CONFIG_FILE": "/a\0b"}}),
    ("--state-dir", {"flags": {"--state-dir": "/a\udcff"}}),
    ("c.yaml:1:16", {"own": 'paths: {state: "/a\\0"}'}),
    ("c.yaml:1:24", {"own": 'sharing: {filterUUIDs: ["x\\0"]}'}),
    ("d.yaml:1:27", {"devices": 'nvidia: {libCudaLogLevel: "\\0"}'}),
]


@pytest.mark.parametrize(("where", "sources"), TEXT_FIELDS)
def test_a_text_that_no_path_and_no_message_can_hold_is_refused(where: str, sources):
    assert str(refusal(**sources)).startswith(f"{where}: ")


@pytest.mark.parametrize("written", ["1_0", " 1", "\uff11", "1e", "0x1", "inf"])
def test_a_number_in_a_text_is_written_with_plain_digits(written: str):
    own = f"sharing: {{memoryScaling: '{written}'}}"

    assert "expected a number" in str(refusal(own=own))
    assert "expected a number" in str(
        refusal(environ={"HAMI_AGENT_SHARING_MEMORY_SCALING": written})
    )


@pytest.mark.parametrize(
    ("written", "shown"),
    [("", "nothing"), ("null", "`null`"), ("[true]", "a list"), ("yes", "`yes`"), ("{}", "a map")],
)
def test_a_refusal_quotes_our_own_file_as_it_is_written(written: str, shown: str):
    error = refusal(own=f"web:\n  port: {written}\n")

    assert f"web.port: expected a whole number, found {shown}" in str(error)


def test_an_entry_of_a_list_is_named_in_the_words_of_the_file():
    assert str(refusal(own="sharing: {filterIndexes: [0, true]}")).endswith("found true")


@pytest.mark.parametrize("size", [20, 30, 42])
def test_a_half_written_json_is_refused_in_a_whole_sentence(size: int):
    half = '{"nodeconfig":[{"name":"a","operatingmode\n'
    assert not str(refusal(nodes=half[:size])).endswith(" at")


LISTED = "expected one or more of envvar, volume-mounts, cdi-annotations, cdi-cri, found "


@pytest.mark.parametrize(
    ("where", "sources"),
    [
        ("c.yaml:1:35", {"own": "allocation: {deviceListStrategy:  [bogus]}"}),
        ("c.yaml:1:35", {"own": "allocation: {deviceListStrategy:  []}"}),
        ("env DEVICE_LIST_STRATEGY", {"environ": {"DEVICE_LIST_STRATEGY": "bogus"}}),
        ("--device-list-strategy", {"flags": {"--device-list-strategy": ""}}),
    ],
)
def test_a_device_list_strategy_that_is_none_is_refused_with_its_place(where: str, sources):
    assert str(refusal(**sources)).startswith(f"{where}: allocation.deviceListStrategy: {LISTED}")


@pytest.mark.parametrize(("key", "like"), [("Kind", "nvidia.com/gpu"), ("AnnotationPrefix", "cdi")])
def test_a_name_for_cdi_that_is_none_is_refused_with_its_place(key: str, like: str):
    error = str(refusal(own=f"allocation:\n  cdi{key}: a b\n"))

    assert error.startswith(f"c.yaml:2:{8 + len(key)}: allocation.cdi{key}: expected ")
    assert like in error


def test_a_device_list_strategy_is_part_of_all_that_is_wrong():
    error = refusal(own="allocation: {deviceListStrategy: [x], cdiKind: y}\nweb: {port: z}")

    assert 3 == len(error.every)


def test_a_profile_with_such_a_value_is_refused_when_the_file_is_read():
    own = "profiles: [{name: p, match: {labels: x=y}, allocation: {deviceListStrategy: [bogus]}}]"

    assert "allocation.deviceListStrategy" in str(refusal(own=own))


SCALARS = st.sampled_from(
    [
        *(HUGE, f"-{HUGE}", CLOCK, CLOCK[:-2], GREAT, f"-{GREAT}", "1e400", ".nan", "-.inf", "~"),
        *("0b_", "2001-99-99", "!!set {a}", "!!omap [a]", "!!binary x", "!%ff x", "!!int x", "<<"),
        *("! x", "!!float 1:1", "!!timestamp 1", "0001-01-01T00:00:00+23:59", "{<<: 1}", '"\\0"'),
        "{? [a] : b}",
    ]
)
VALUES = st.recursive(
    SCALARS | st.integers().map(str) | st.floats().map(str) | st.text(max_size=6).map(json.dumps),
    lambda one: (
        st.lists(one, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(st.sampled_from("abc"), one, max_size=2).map(
            lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs.items()) + "}"
        )
    ),
    max_leaves=4,
)
KEYS = st.sampled_from(sorted(field.key for field in FIELDS))
HAMIS = st.sampled_from(
    [
        *("deviceSplitCount", "deviceMemoryScaling", "libCudaLogLevel", "gpuCorePolicy"),
        *("overwriteEnv", "resourceCountName", "migProfileAllowlist", "knownMigGeometries"),
        "preConfiguredDeviceMemory",
    ]
)
NODES = st.sampled_from(
    [
        *("name", "operatingmode", "devicesplitcount", "devicememoryscaling", "devicecorescaling"),
        *("libcudaloglevel", "enablenumatopology", "filterdevices", "preconfigureddevicememory"),
    ]
)
WORDS = st.text(max_size=8) | st.text(
    st.characters(codec=None, categories=["Cs", "Nd", "Cc", "No"]), max_size=5
)
NUMBERS = st.sampled_from([HUGE, GREAT, 5000 * "9", "1e999", "nan", "-inf", "\u00b2", "1_0"])


@given(KEYS, VALUES)
@settings(deadline=None)
def test_any_value_of_any_key_of_our_own_file_is_taken_or_refused(key: str, value: str):
    *sections, name = key.split(".")
    body = f"{name}: {value}"
    for section in sections:
        body = f"{section}: {{{body}}}"
    taken_or_refused(own=body)
    taken_or_refused(own=f"profiles: [{{name: p, match: {{nodes: [a]}}, {body}}}]")
    taken_or_refused(own=f"profiles: [{{name: {value}, match: {{nodes: [a], labels: {value}}}}}]")


@given(HAMIS, VALUES)
@settings(deadline=None)
def test_any_text_in_hamis_yaml_is_taken_or_refused(key: str, value: str):
    taken_or_refused(devices=f"nvidia: {{{key}: {value}}}")


@given(NODES, VALUES)
@settings(deadline=None)
def test_any_text_in_hamis_json_is_taken_or_refused(key: str, value: str):
    taken_or_refused(nodes=f'{{"nodeconfig":[{{"name":"a","{key}":{value}}}]}}')


@given(st.sampled_from(FIELDS), WORDS | NUMBERS)
@settings(deadline=None)
def test_any_text_in_the_environment_and_in_flags_is_taken_or_refused(field, value: str):
    for name in field.variables:
        taken_or_refused(environ={name: value})
    taken_or_refused(environ={f"HAMI_AGENT_{value}": value})
    if field.flag:
        taken_or_refused(flags={field.flag: value})


@pytest.mark.parametrize("name", ["GPU-1", "gpu_1", "gpu 1", "-gpu", "gpu.", 254 * "a"])
def test_a_name_that_no_node_can_have_is_refused(name: str):
    assert "expected the name of a Node" in str(refusal(own=f"node: {{name: '{name}'}}"))
    assert "expected the name of a Node" in str(refusal(environ={"NODE_NAME": name}))


@pytest.mark.parametrize("name", ["SPLIT_COUNT", "CONFIG", "SERVICE", ""])
def test_a_variable_of_the_agent_that_no_setting_reads_is_refused(name: str):
    said = str(refusal(environ={f"HAMI_AGENT_{name}": "1", "PATH": "/bin"}))

    assert said.startswith(f"env HAMI_AGENT_{name}: unknown setting; a variable is HAMI_AGENT_ and")
    assert said.endswith("the flag --config names the settings file")
