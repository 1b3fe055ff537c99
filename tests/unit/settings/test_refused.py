"""What is wrong in a source is one sentence with its place, whatever the source holds.

c.yaml is the agent's own file, d.yaml HAMi's device-config.yaml, n.json HAMi's config.json.
"""

import json

import pytest
import yaml

from agent.errors import SettingsError
from agent.ledger import SourceFile
from agent.settings.files import Place, read_yaml
from agent.settings.reading import Sources, make_plan
from agent.settings.schema import FIELDS, build
from tests.unit.rows import rows_of
from tests.unit.settings.plans import plan_of, sources_of

GREAT = "1" + 309 * "0"
HUGE = "0x" + 5000 * "f"
CLOCK = ":".join(200 * ["1"]) + ".5"
"""YAML 1.1's sixties: a whole number that no float holds, and a half."""
FACTS = ("a", {"x": "a"})


def refusal(**sources: object) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        plan_of(**sources)  # type: ignore[arg-type]
    return caught.value


ROWS = rows_of(__file__, "refused.txt")
LONG = "\n".join(f"{'  ' * n}k{n}:" for n in range(25))
ODD = [
    ({"own": "a:\n  b: 1\n\tc: 1\n"}, "c.yaml:3:1: not valid YAML: found a tab character"),
    ({"own": "a: " + "[" * 30_000}, "c.yaml:1:23: no settings file needs aliases, or more than 20"),
    ({"own": f"{LONG}\n"}, "c.yaml:21:41: no settings file needs aliases, or more than 20"),
    (
        {"own": f'sharing: {{filterIndexes: ["{200_000 * " "}x"]}}'},
        "c.yaml:1:26: sharing.filterIndexes: expected a whole number, found",
    ),
    (
        {"own": f"library: {{cudaLogLevel: {HUGE}}}"},
        "c.yaml:1:25: library.cudaLogLevel: expected text in quotes, found `0xffff",
    ),
    ({"own": f"node: {{name: {254 * 'a'}}}"}, "c.yaml:1:14: node.name: expected the name of a"),
    ({"own": "sharing: {memoryScaling: '\uff11'}"}, "c.yaml:1:26: sharing.memoryScaling: "),
    ({"own": "a: 1\nb: x\x01y\n"}, "c.yaml: is not UTF-8 text, or has a control character: "),
    ({"environ": {"NODE_NAME": "a\udcff"}}, "env NODE_NAME: node.name: expected text of UTF-8"),
    (
        {"environ": {"HAMI_AGENT_SERVICE_HOST": "10.0.0.7", "HAMI_AGENT_SIMULATE": "h100:8"}},
        "env HAMI_AGENT_SIMULATE: unknown setting; a variable",
    ),
    ({"flags": {"--state-dir": "/a\udcff"}}, "--state-dir: paths.state: expected text of UTF-8"),
    ({"nodes": '{"[[": ["' + "[" * 30 + '",\n' + "[" * 200_000}, "n.json:2:19: no settings file"),
]


@pytest.mark.parametrize(
    ("sources", "says"),
    [*((sources_of(row), says) for row, says in ROWS if not row.startswith("entry ")), *ODD],
)
def test_a_wrong_source_is_refused_with_its_place(sources: dict[str, object], says: str):
    assert str(refusal(**sources)).startswith(says)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        *(row for row in ROWS if row[0].startswith("entry ")),
        (f'entry {{"devicesplitcount":{5000 * "1"}}}', "36: "),
    ],
)
def test_a_wrong_entry_of_config_json_is_told_with_its_place(row: str, says: str):
    entry = row.removeprefix("entry ")
    (warning,) = plan_of(nodes=f'{{"nodeconfig":[{entry}]}}').warnings
    assert warning.startswith(f"n.json:1:{says}")


# Whatever stands in the sources: taken, or refused with the place.

FILES = {
    "devices": b"nvidia:\n  deviceSplitCount: 4\n  deviceMemoryScaling: 1.5\n  libCudaLogLevel: 3\n"
    b"  migProfileAllowlist:\n    - models: [A30]\n      profiles: [1g.6gb]\n",
    "own": b"sharing:\n  splitCount: 4\n  filterIndexes: [0, 3]\nprofiles:\n  - name: big\n"
    b'    match: {nodes: ["a*"], labels: "x in (a, b)"}\n    library: {corePolicy: force}\n',
    "nodes": b'{"nodeconfig": [{"name": "a", "devicesplitcount": 5,\n'
    b'  "filterdevices": {"uuid": ["GPU-1"], "index": [0]}}]}',
}
NAMES = {"devices": "device_config", "own": "own", "nodes": "node_config"}


def of_bytes(kind: str, content: bytes) -> str:
    """The sentence; empty: the file is taken."""
    try:
        plan = make_plan(Sources(**{NAMES[kind]: SourceFile("file", content)}))  # type: ignore[arg-type]
        build(plan.resolve(*FACTS), host_name="a")
    except SettingsError as error:
        str(error).encode()
        assert str(error).startswith("file:")  # noqa: PT017 -- many are taken
        return str(error)
    return ""


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("junk", [b"\x00", b"\xff", b"[", b"{", b"- ", b"a", b"&a ", b'"', b"\t"])
def test_much_of_one_byte_is_refused(kind: str, junk: bytes):
    assert of_bytes(kind, junk * (200_000 // len(junk)))


VALUES = [
    *(HUGE, f"-{HUGE}", CLOCK, CLOCK[:-2], GREAT, f"-{GREAT}", "1e400", ".nan", "-.inf", "~"),
    *("0b_", "2001-99-99", "!!set {a}", "!!omap [a]", "!!binary x", "!%ff x", "!!int x", "<<"),
    *("! x", "!!float 1:1", "!!timestamp 1", "0001-01-01T00:00:00+23:59", "{<<: 1}", '"\\0"'),
    *("{? [a] : b}", "!!bool maybe", "!!int ''", "!!int [1]", "!!timestamp x", "!!str [a]"),
    *("", "1", "-2.5", '"x"', '"\\ud800"', "[[], {a: [~]}]", "[1, .nan, x]", "{a: {b: 1}}"),
]
KEYS = sorted(field.key for field in FIELDS)
HAMIS = [
    *("deviceSplitCount", "deviceMemoryScaling", "libCudaLogLevel", "gpuCorePolicy"),
    *("overwriteEnv", "resourceCountName", "migProfileAllowlist", "knownMigGeometries"),
    *("name", "operatingmode", "devicesplitcount", "devicememoryscaling", "filterdevices"),
    *("enablenumatopology", "preconfigureddevicememory", "nodelabelselector"),
]


@pytest.mark.parametrize("shift", range(4))
def test_any_value_of_any_key_is_taken_or_refused(shift: int):
    """Each time every key has another value, and every value is some key's."""
    for number, key in enumerate(KEYS):
        value, theirs = (VALUES + VALUES)[(number + 11 * shift) % len(VALUES)], HAMIS[number % 16]
        *sections, name = key.split(".")
        body = f"{name}: {value}"
        for section in sections:
            body = f"{section}: {{{body}}}"
        for kind, text in (
            ("own", body),
            ("own", f"profiles: [{{name: p, match: {{nodes: [a]}}, {body}}}]"),
            ("own", f"profiles: [{{name: {value}, match: {{nodes: [a], labels: {value}}}}}]"),
            ("devices", f"nvidia: {{{theirs}: {value}}}"),
            ("nodes", f'{{"nodeconfig":[{{"name":"a","{theirs}":{value}}}]}}'),
        ):
            of_bytes(kind, text.encode(errors="replace"))


# HAMi's config.json is read as JSON, though its places are those of YAML.

JSON = [
    *(None, True, False, 0, -1, 2**64, 1.5, -1e300, 1e-7, [], {}, [[], {"a": [1, {"b": None}]}]),
    *("", "~", "1", "true", "2001-01-01", "a: b #c", " x ", '\n\t\\"/', "é\u2028\uffee", "- a"),
    *([r"\u0041 \ud83d", "\u2028"], {"a": "x", "b": [0.1, "", {}], "c": {"d": [[[]]]}}, "'", "&a"),
]


def plain(place: Place) -> object:
    """The whole value, part by part."""
    if isinstance(place.node, yaml.MappingNode):
        return {key: plain(value) for key, _, value in place.pairs()}
    is_list = isinstance(place.node, yaml.SequenceNode)
    return [plain(item) for item in place.items()] if is_list else place.value()


@pytest.mark.parametrize("value", JSON, ids=str)
def test_json_is_read_as_json_reads_it(value: object):
    for indent, is_ascii in ((None, True), (2, False), ("\t", True)):
        text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
        assert value == plain(read_yaml(text.encode(), "f.json", is_json=True))


def test_a_character_outside_the_first_plane_stands_as_it_is_and_not_as_two_escapes():
    assert ["\U0001f600"] == plain(read_yaml('["\U0001f600"]'.encode(), "f", is_json=True))
    says = "^f.json:1:[0-9]+: not valid YAML: found invalid Unicode character"
    with pytest.raises(SettingsError, match=says):
        read_yaml(rb'["\ud83d\uDE00"]', "f.json", is_json=True)
