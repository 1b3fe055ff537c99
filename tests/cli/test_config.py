"""`config`: what each node would get, with the place of every value, or what is wrong."""

import json
from pathlib import Path

import pytest

from agent.cli.main import dispatch


def checked(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert code == dispatch(["config", "check", *words], {})
    out = capsys.readouterr()
    return out.out, out.err


def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> list[str]:
    monkeypatch.chdir(tmp_path)
    for name, text in texts.items():
        Path(name).write_text(text)
    return list(texts)


OWN = """sharing:
  splitCount: 8
profiles:
  - name: big
    match: {nodes: ["gpu-a*", gpu-z], labels: zone=a}
    sharing: {splitCount: 20}
"""
DEVICES = "nvidia:\n  deviceMemoryScaling: 1.5\n  deviceColour: red\n"
NODES = '{"nodeconfig": [{"name": "gpu-b", "devicesplitcount": 5}]}'


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    for name, text in (("config.yaml", OWN), ("device.yaml", DEVICES), ("config.json", NODES)):
        (tmp_path / name).write_text(text)
    return ["config.yaml", "--device-config", "device.yaml", "--nodeconfig", "config.json"]


FILES = [
    ["files.deviceConfig", "device.yaml", "--device-config"],
    ["files.nodeConfig", "config.json", "--nodeconfig"],
]
SCALING = ["sharing.memoryScaling", "1.5", "device.yaml:2:24"]


def split_count(count: str, place: str) -> list[str]:
    return ["sharing.splitCount", count, place]


def test_what_all_nodes_get_is_printed_and_what_a_node_gets_by_its_name(files, capsys):
    out, err = checked(capsys, *files, "--node", "gpu-b", "--node", "gpu-z")

    assert [
        ["gpu-b"],
        *FILES,
        split_count("5", "config.json:1:55"),
        SCALING,
        ["gpu-z"],
        *FILES,
        split_count("8", "config.yaml:2:15"),
        SCALING,
        ["ok"],
    ] == [line.split() for line in out.splitlines()]
    assert [
        "hami-agent: warning: device.yaml:3:3: deviceColour cannot be set here; see SETTINGS.md",
        "hami-agent: note: what selects by labels is left out: config check has --label KEY=VALUE",
    ] == err.splitlines()
    assert ["all nodes", "  sharing.splitCount  8      config.yaml:2:15", "ok"] == checked(
        capsys, files[0]
    )[0].splitlines()


def test_labels_of_a_node_decide_its_profiles(files, capsys):
    out, _ = checked(capsys, *files, "--node", "gpu-a1", "--label", "zone=a")

    assert [
        ["gpu-a1,", "profile", "big"],
        *FILES,
        split_count("20", "config.yaml:6:27"),
        SCALING,
        ["ok"],
    ] == [line.split() for line in out.splitlines()]


def test_a_program_gets_the_same_as_json(files, capsys):
    out, _ = checked(capsys, *files, "--node", "gpu-b", "-o", "json")
    document = json.loads(out)
    data = document["data"]

    assert ("ConfigCheck", True) == (document["kind"], data["ok"])
    assert ["device.yaml:3:3: deviceColour cannot be set here; see SETTINGS.md"] == data["warnings"]
    assert [
        {
            "name": "gpu-b",
            "profiles": [],
            "settings": [
                *(dict(zip(("key", "value", "origin"), row, strict=True)) for row in FILES),
                {"key": "sharing.splitCount", "value": 5, "origin": "config.json:1:55"},
                {"key": "sharing.memoryScaling", "value": 1.5, "origin": "device.yaml:2:24"},
            ],
        }
    ] == data["nodes"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["none.yaml"], "none.yaml: cannot be read: No such file"),
        (["config.yaml", "--split-count", "0"], "--split-count: sharing.splitCount: expected 1"),
    ],
)
def test_what_cannot_be_checked_says_why(files, capsys, words, says):
    assert says in checked(capsys, *words, code=1)[1]


@pytest.mark.parametrize("label", ["zone", "=a"])
def test_a_label_that_is_none_is_wrong_usage(files, capsys, label):
    assert 2 == dispatch(["config", "check", files[0], "--label", label], {})
    assert f"argument --label: '{label}' is not KEY=VALUE" in capsys.readouterr().err


def test_without_a_file_the_sources_of_this_host_are_checked(files, capsys):
    assert 0 == dispatch(["config", "check", files[0]], {"HAMI_AGENT_XYZ": "not looked at"})
    assert 1 == dispatch(["config", "check"], {"HAMI_AGENT_XYZ": "1"})
    assert "env HAMI_AGENT_XYZ: unknown setting" in capsys.readouterr().err


def test_the_schema_is_printed(capsys):
    assert 0 == dispatch(["config", "schema"], {})
    assert (
        "splitCount" in json.loads(capsys.readouterr().out)["properties"]["sharing"]["properties"]
    )


WRONG = {
    "c.yaml": "sharing: {splitCuont: 4, memoryScaling: lots}\nshraing: {x: 1}\n"
    "profiles:\n- {name: p, sharing: {coreScaling: x}}\n- {name: q, match: {node: [a]}}",
    "d.yaml": "nvidia:\n  deviceSplitCount: x\n  deviceMemoryScaling: -1\n"
    "  disableCoreLimit: maybe",
}


def test_everything_that_is_wrong_is_told_at_once_with_its_place(tmp_path, monkeypatch, capsys):
    written(tmp_path, monkeypatch, **WRONG)

    found = []
    for words in (["c.yaml"], ["--device-config", "d.yaml"]):
        out, err = checked(capsys, *words, "-o", "json", code=1)
        errors = json.loads(out)["data"]["errors"]
        assert [f"hami-agent: {error}" for error in errors] == err.splitlines()
        found += errors

    assert found == [
        "c.yaml:1:11: sharing.splitCuont cannot be set here; see SETTINGS.md",
        "c.yaml:1:41: sharing.memoryScaling: expected a number, found `lots`",
        "c.yaml:2:1: shraing cannot be set here; see SETTINGS.md",
        "c.yaml:4:36: sharing.coreScaling: expected a number, found `x`",
        "c.yaml:5:21: match.node cannot be set here; see SETTINGS.md",
        "d.yaml:2:21: sharing.splitCount: expected a whole number, found `x`",
        "d.yaml:3:24: sharing.memoryScaling: expected 0.01 to 10, found `-1`",
        "d.yaml:4:21: library.disableCoreLimit: expected true or false, found `maybe`",
    ]


def test_run_says_it_in_one_sentence(tmp_path, monkeypatch, capsys):
    file, *_ = written(tmp_path, monkeypatch, **WRONG)
    words = ["--config", file, "--state-dir", str(tmp_path)]

    assert [78, 78] == [dispatch([*verb, *words], {}) for verb in (["run"], ["config", "show"])]
    assert 78 == dispatch(["run"], {"HAMI_AGENT_WEB_PROT": "1"})

    line, _, unknown = capsys.readouterr().err.splitlines()
    assert "HAMI_AGENT_WEB_PROT" in unknown
    assert "c.yaml:1:11: sharing.splitCuont cannot be set" in line
    assert line.endswith("(and 4 more: see `hami-agent config check`)")


SELECTED = {
    "nodeconfig": [
        {"nodelabelselector": {"matchLabels": {"Pool": "x"}}, "devicesplitcount": 4},
        {"name": "*", "devicesplitcount": 3},
        {"name": "b", "operatingmode": "unknown"},
    ]
}


def test_what_selects_by_labels_needs_labels_and_that_is_told(tmp_path, monkeypatch, capsys):
    files = ["--nodeconfig", *written(tmp_path, monkeypatch, **{"n.json": json.dumps(SELECTED)})]
    row = "  sharing.splitCount  {}"

    out, err = checked(capsys, *files, "--node", "a")
    assert any(line.startswith(row.format(3)) for line in out.splitlines())
    assert "note: what selects by labels is left out" in err
    out, err = checked(capsys, *files, "--node", "a", "--label", "Pool=x")
    assert any(line.startswith(row.format(4)) for line in out.splitlines())
    assert "note" not in err
    assert "warning: n.json:1:164: sharing.operatingMode: expected one of" in err

    for asked in ((), ("--node", "b")):
        assert "n.json:1:164: sharing.operatingMode" in checked(capsys, *files, *asked, code=1)[1]

    flags = (*files, "--device-config", "", "--node-name", "a")
    assert 0 == dispatch(["config", "show", "--diff", *flags], {})
    shown = capsys.readouterr()
    assert "note: what selects by labels is left out" in shown.err
    assert "sharing.splitCount" in shown.out


# Command lines and environments that were made for HAMi's plugin: taken, told of, or refused.

CHART = "--mig-strategy=none --disable-core-limit -v=4 --v=false --node-name=n"


@pytest.mark.parametrize("switch", ["--pass-device-specs", "--pass-device-specs=true"])
@pytest.mark.parametrize("flag", ["--config-file", "--device-config"])
def test_a_command_line_of_hamis_chart_is_taken(files, capsys, switch, flag):
    words = [*CHART.split(), switch, "--report-node-capacity", f"{flag}=device.yaml"]
    assert 0 == dispatch(["config", "show", "--diff", "--origin", *words], {"HOOK_PATH": "/h"})

    out = capsys.readouterr()
    assert [
        ["node.name", "n", "--node-name"],
        ["files.deviceConfig", "device.yaml", "--device-config"],
        ["sharing.memoryScaling", "1.5", "device.yaml:2:24"],
        ["allocation.passDeviceSpecs", "true", "--pass-device-specs"],
        ["library.hookPath", "/h", "env", "HOOK_PATH"],
    ] == [line.split() for line in out.out.splitlines()[1:]]
    assert [
        "hami-agent: warning: device.yaml:3:3: deviceColour cannot be set here; see SETTINGS.md",
        "hami-agent: warning: --mig-strategy: has no effect here",
        "hami-agent: warning: --disable-core-limit: has no effect here",
        "hami-agent: warning: --report-node-capacity: has no effect here",
    ] == out.err.splitlines()
