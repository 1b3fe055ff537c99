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
from tests.unit.settings.plans import plan_of

GREAT = "1" + 309 * "0"
HUGE = "0x" + 5000 * "f"
CLOCK = ":".join(200 * ["1"]) + ".5"
"""YAML 1.1's sixties: a whole number that no float holds, and a half."""
STRATEGIES = "envvar, volume-mounts, cdi-annotations, cdi-cri"
FACTS = ("a", {"x": "a"})


def refusal(**sources: object) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        plan_of(**sources)  # type: ignore[arg-type]
    return caught.value


OWN = [
    # no YAML
    *(
        (text, f"{place}: not valid YAML: {says}")
        for text, place, says in [
            ("sharing: [", "2:1", ""),
            ("a:\n  b: 1\n\tc: 1\n", "3:1", "found a tab character"),
            ("a: @b\n", "1:4", "found character that cannot start"),
            ("a: b: c\n", "1:5", "mapping values are not allowed"),
            # a scalar that its type cannot hold
            ("node: {name: 2026-99-99}", "1:14", ""),
            ("node: {name: !!binary x}", "1:14", ""),
        ]
    ),
    ("a: " + "[" * 30_000, "1:23: no settings file needs aliases, or more than 20 levels"),
    # no settings file
    ("- a\n- b\n", "1:1: keys and values are expected here, not a list"),
    ("1: 2", "1:1: a text key is expected, not `1`"),
    ("sharing: &a {splitCount: 1}\nother: *a\n", "2:8: no settings file needs aliases"),
    (
        "".join(f"{'  ' * n}k{n}:\n" for n in range(25)),
        "21:41: no settings file needs aliases, or more than 20",
    ),
    ("node: {name: a, name: b}", "1:17: the key `name` stands here twice"),
    ("node: !!python/object:os.system {}", "1:7: keys and values are expected here"),
    # a template that was not rendered
    ("sharing:\n  splitCount: {{ .Values.n }}\n", "2:15: not valid YAML"),
    # keys
    ("sharing:\n  splitCuont: 4\n", "2:3: sharing.splitCuont cannot be set here; see SETTINGS.md"),
    ("sharing.splitCount: 5", "1:1: sharing.splitCount cannot be set here"),
    ("sharing: 7", "1:10: keys and values are expected here, not `7`"),
    # values
    *(
        (
            f"{section}: {{{name}: {value}}}",
            f"1:{len(section) + len(name) + 6}: {section}.{name}: expected {says}",
        )
        for section, name, value, says in [
            ("sharing", "splitCount", "many", "a whole number, found `many`"),
            ("sharing", "splitCount", "0", "1 to 3000, found `0`"),
            ("sharing", "splitCount", "true", "a whole number"),
            ("sharing", "splitCount", "[true]", "a whole number, found a list"),
            ("sharing", "memoryScaling", ".nan", "a number"),
            ("sharing", "memoryScaling", "-1", "0.01 to 10"),
            ("sharing", "filterUUIDs", "4", "a list, found `4`"),
            ("sharing", "filterIndexes", "[-1]", "0 to 1000000, found a list"),
            ("sharing", "filterIndexes", '["x"]', "a whole number, found a list"),
            ("sharing", "filterIndexes", f'["{200_000 * " "}x"]', "a whole number, found"),
            ("sharing", "operatingMode", "mi", "one of hami-core, mps, mig"),
            ("sharing", "resourceName", "gpu", "a name like nvidia.com/gpu"),
            ("library", "disableCoreLimit", "maybe", "true or false"),
            ("library", "hookPath", "here", "an absolute path"),
            ("library", "cudaLogLevel", "true", "text in quotes, found `true`"),
            ("library", "cudaLogLevel", HUGE, "text in quotes, found `0xffff"),
            ("allocation", "unlockedPods", "legacy", "one of strict, scheduled, unique"),
            ("allocation", "fence", "always", "one of none, prestart"),
            *(
                ("allocation", "cdiKind", kind, "text like nvidia.com/gpu")
                for kind in ("a b", "gpu", "nvidia.com/gpu=0")
            ),
            *(
                ("allocation", "cdiAnnotationPrefix", prefix, "text like cdi")
                for prefix in ("a b", "cdi.k8s.io", "a/b/")
            ),
            ("allocation", "deviceListStrategy", "[x]", f"one of {STRATEGIES}, found a list"),
            ("report", "profile", "colon-7", "one of json, colon, found `colon-7`"),
            ("health", "driverHang", "2 s", "a duration such as 500ms, 2s, 10m or 1h, found `2 s`"),
            ("health", "driverHang", "2h", "1s to 1h, found `2h`"),
            ("paths", "state", '"/a\\0"', "text of UTF-8 characters without NUL"),
            *(("node", "name", name, "the name of a Node") for name in ("GPU-1", "gpu_1", "a.")),
            ("node", "name", 254 * "a", "the name of a Node"),
        ]
    ),
    ("scheduler: volcano", "1:12: scheduler: expected one of hami, none"),
    # profiles
    *(
        (f"profiles: [ {profile} ]", f"1:{column}: {says}")
        for profile, column, says in [
            *(
                (profile, 13, "a profile needs `name`, and `nodes` or `labels` under")
                for profile in ("{match: {nodes: [a]}}", "{name: p}", "{name: p, match: {}}")
            ),
            ("{name: p, match: {node: [a]}}", 31, "match.node cannot be set here"),
            ("{name: 3, match: {nodes: [a]}}", 20, "name: expected text in quotes, found `3`"),
            ("{name: '', match: {nodes: [a]}}", 20, "name: expected a text that is not empty"),
            ("{name: p, match: {nodes: [a], nodes: [b]}}", 43, "the key `nodes`"),
            ("{name: p, match: {nodes: []}}", 38, "match.nodes: expected"),
            ("{name: p, match: {nodes: [3]}}", 38, "match.nodes: expected"),
            ("{name: p, match: {labels: 'a b'}}", 39, "match.labels: 'a b' is not a valid"),
        ]
    ),
    *(
        (f"profiles: [ {{name: p, match: {{nodes: [a]}}, {more}}} ]", f"1:{column}: {says}")
        for more, column, says in [
            ("web: {port: 1}", 44, "web cannot be set here"),
            ("sharing: {resourceName: a.b/c}", 54, "sharing.resourceName cannot be set"),
            ("sharing: {splitCount: 0}", 66, "sharing.splitCount: expected 1 to 3000, found `0`"),
        ]
    ),
]
COUNT, SCALE = "sharing.splitCount: expected ", "sharing.memoryScaling: expected "
DEVICES = [
    *(
        (f"{{{key}: {value}}}", f"{len(key) + 12}: {says}")
        for key, value, says in [
            ("deviceSplitCount", "[1]", f"{COUNT}a whole number, found a list"),
            *(
                ("deviceSplitCount", value, COUNT)
                for value in ("x", "5.5", "1e400", ".inf", "'1:30'", "1.5e0", "1e1", "0o17")
            ),
            ("deviceSplitCount", "-1", f"{COUNT}1 to 3000, found `-1`"),
            ("deviceSplitCount", "0", f"{COUNT}1 to 3000, found `0`"),
            *(
                ("deviceMemoryScaling", value, SCALE)
                for value in ("much", ".nan", "1e999", "2001-01-01", "[1.5]", "yes", "1:30.5")
            ),
            ("defaultMemory", "2147483648", "sharing.defaultMemoryMiB: expected -2147483648 to "),
            ("resourceCountName", "[x]", "sharing.resourceName: expected text, found a list"),
            ("disableCoreLimit", "2", "library.disableCoreLimit: expected true or false"),
        ]
    ),
    ('{libCudaLogLevel: "\\0"}', "27: library.cudaLogLevel: expected text of UTF-8"),
    ("{1: x}", "10: a text key is expected, not `1`"),
    ("{overwriteEnv: yes, overwriteEnv: no}", "29: the key `overwriteEnv` stands here twice"),
]
NODES = [
    ('{"name":1}', "24: name: expected text in quotes, found `1`"),
    ('{"devicememoryscaling":NaN}', "39: sharing.memoryScaling: expected a number"),
    (f'{{"devicesplitcount":{5000 * "1"}}}', "36: "),
    ('{"devicesplitcount":0.5}', "36: sharing.splitCount: expected a whole number, found `0.5`"),
    ('{"enablenumatopology":"yes"}', "38: sharing.numaTopology: expected true or false"),
    ('{"filterdevices":{"index":[-1]}}', "42: sharing.filterIndexes: expected 0 to"),
    ('{"name":"a","Name":"b"}', "28: the key `name` stands here twice"),
    *(
        (f'{{"nodelabelselector":{json.dumps(selector)}}}', "37: nodelabelselector: expected a lab")
        for selector in [
            {"matchLabels": {"gpu": 1}},
            {"matchLabels": ["gpu"]},
            {"MATCHLABELS": {"gpu": "a100"}},
            {"matchExpressions": [{"key": "gpu", "operator": "In", "values": "a100"}]},
            "gpu=a100",
        ]
    ),
]
OTHERS = [
    *(
        ({"environ": {name: value}}, f"env {name}: {says}")
        for name, value, says in [
            ("HAMI_AGENT_WEB_PORT", "http", "web.port: expected a whole number"),
            ("HAMI_AGENT_SPLIT_COUNT", "1", "unknown setting; a variable is"),
            ("NODE_NAME", "a\udcff", "node.name: expected text of UTF-8"),
            ("DEVICE_LIST_STRATEGY", "x", "allocation.deviceListStrategy: expected one of"),
            ("HAMI_AGENT_HEALTH_XIDS", "94", "health.xids: expected XID=CLASS"),
            ("HAMI_AGENT_HEALTH_XIDS", "4=fatal,4=contained", "health.xids: expected one class "),
        ]
    ),
    (
        {"environ": {"HAMI_AGENT_SERVICE_HOST": "10.0.0.7", "HAMI_AGENT_SIMULATE": "h100:8"}},
        "env HAMI_AGENT_SIMULATE: unknown setting; a variable",
    ),
    ({"flags": {"--device-list-strategy": ""}}, "--device-list-strategy: allocation.deviceListS"),
    ({"flags": {"--state-dir": "/a\udcff"}}, "--state-dir: paths.state: expected text of UTF-8"),
    *(
        ({"nodes": text}, says)
        for text, says in [
            ("[]", "n.json:1:1: keys and values are expected here, not a list"),
            (
                '{"nodeconfig":[{"name":"a","operat\n',
                "n.json:2:1: not valid YAML: found unexpected end",
            ),
            ('{"a": }', "n.json:1:7: not valid JSON"),
            ("[" * 21 + "]" * 21, "n.json:1:21: no settings file needs aliases, or more than 20"),
            (
                '{"[[": ["' + "[" * 30 + '",\n' + "[" * 200_000,
                "n.json:2:19: no settings file needs",
            ),
            ('{"a": 1}\n{}', "n.json:2:1: not valid YAML: "),
            ('{"nodeconfig": [],}', "n.json:1:"),
        ]
    ),
    *(
        ({"own": f"sharing: {{memoryScaling: '{text}'}}"}, "c.yaml:1:26: sharing.memoryScaling: ")
        for text in ("1_0", " 1", "\uff11", "1e", "0x1", "inf")
    ),
]
ROWS = [
    *(({"own": text}, f"c.yaml:{says}") for text, says in OWN),
    *(({"devices": f"nvidia: {text}"}, f"d.yaml:1:{says}") for text, says in DEVICES),
    *OTHERS,
    ({"devices": "nvidia: ["}, "d.yaml:2:1: not valid YAML: did not find"),
    ({"own": "a: 1\nb: x\x01y\n"}, "c.yaml: is not UTF-8 text, or has a control character: "),
]


@pytest.mark.parametrize(("sources", "says"), ROWS)
def test_a_wrong_source_is_refused_with_its_place(sources: dict[str, object], says: str):
    assert str(refusal(**sources)).startswith(says)


@pytest.mark.parametrize(("entry", "says"), NODES)
def test_a_wrong_entry_of_config_json_is_told_with_its_place(entry: str, says: str):
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
