"""`config`: what each node would get, with the place of every value, or what is wrong."""

import io
import json
import os
from pathlib import Path

import pytest

from agent.cli.main import dispatch


def checked(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert code == dispatch(["config", "check", *words], {"HAMI_AGENT_XYZ": "not looked at"})
    out = capsys.readouterr()
    assert "json" in words or all(len(line) <= 80 for line in out.out.splitlines())
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
    return ["config.yaml", "device.yaml", "config.json"]


def test_every_node_that_the_files_name_is_printed_and_all_others_at_once(files, capsys):
    out, err = checked(capsys, *files)

    assert [
        "gpu-z",
        "  sharing.splitCount     8      config.yaml:2:15",
        "  sharing.memoryScaling  1.5    device.yaml:2:24",
        "gpu-b",
        "  sharing.splitCount     5      config.json:1:55",
        "  sharing.memoryScaling  1.5    device.yaml:2:24",
        "other nodes",
        "  sharing.splitCount     8      config.yaml:2:15",
        "  sharing.memoryScaling  1.5    device.yaml:2:24",
        "ok",
    ] == out.splitlines()
    assert [
        "hami-agent: warning: device.yaml:3:3: nvidia: unknown key `deviceColour`",
        "hami-agent: note: the profile big is left out: it needs labels: --label KEY=VALUE",
    ] == err.splitlines()


def test_labels_of_a_node_decide_its_profiles(files, capsys):
    words = ("--node", "gpu-a1", "--label", "zone=a")
    out, _ = checked(capsys, *files, *words)

    assert [
        "gpu-a1, profile big",
        "  sharing.splitCount     20     config.yaml:6:27",
        "  sharing.memoryScaling  1.5    device.yaml:2:24",
        "ok",
    ] == out.splitlines()


def test_a_program_gets_the_same_as_json(files, capsys):
    out, _ = checked(capsys, *files, "--node", "gpu-b", "-o", "json")
    document = json.loads(out)
    data = document["data"]

    assert ("ConfigCheck", True) == (document["kind"], data["ok"])
    assert ["device.yaml:3:3: nvidia: unknown key `deviceColour`"] == data["warnings"]
    assert [
        {
            "name": "gpu-b",
            "profiles": [],
            "settings": [
                {"key": "sharing.splitCount", "value": 5, "origin": "config.json:1:55"},
                {"key": "sharing.memoryScaling", "value": 1.5, "origin": "device.yaml:2:24"},
            ],
        }
    ] == data["nodes"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["config.yaml", "config.yaml"], "is the agent's own file, and so is config.yaml"),
        (["none.yaml"], "none.yaml: cannot be read: No such file"),
        (["config.yaml", "--split-count", "0"], "--split-count: sharing.splitCount: expected 1"),
    ],
)
def test_what_cannot_be_checked_says_why(files, capsys, words: list[str], says: str):
    assert says in checked(capsys, *words, code=1)[1]


def test_a_label_that_is_none_is_wrong_usage(files, capsys):
    assert 2 == dispatch(["config", "check", "config.yaml", "--label", "zone"], {})
    assert "argument --label: zone: expected KEY=VALUE" in capsys.readouterr().err


def test_without_a_file_the_sources_of_this_host_are_checked(capsys):
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
    "  disableCoreLimit: 'true'",
    "n.json": '{"nodeconfig": [{"name": 1, "devicesplitcount": 0.5},\n{"devicesplitcount": 0.5}]}',
}


def test_everything_that_is_wrong_is_told_at_once_with_its_place(tmp_path, monkeypatch, capsys):
    files = written(tmp_path, monkeypatch, **WRONG)

    out, err = checked(capsys, *files, "-o", "json", code=1)

    errors = json.loads(out)["data"]["errors"]
    assert [f"hami-agent: {error}" for error in errors] == err.splitlines()
    expected = [
        "d.yaml:2:21: nvidia.deviceSplitCount: a whole number from 0 is expected, not `x`",
        "d.yaml:4:21: nvidia.disableCoreLimit: true or false is expected, not `true` (text)",
        "d.yaml:3:24: sharing.memoryScaling: expected 0.01 to 10, found -1.0",
        "c.yaml:1:11: unknown setting sharing.splitCuont; `hami-agent config show` lists all",
        "c.yaml:1:41: sharing.memoryScaling: expected a number, found `lots`",
        "c.yaml:2:1: unknown setting shraing; `hami-agent config show` lists all",
        "c.yaml:4:36: sharing.coreScaling: expected a number, found `x`",
        "c.yaml:4:3: profiles[0]: a profile needs `name`, and `nodes` or `labels` under `match`",
        "c.yaml:5:21: unknown setting match.node; `hami-agent config show` lists all",
        "c.yaml:5:3: profiles[1]: a profile needs `name`, and `nodes` or `labels` under `match`",
        "n.json:1:26: nodeconfig[0].name: text is expected, not `1`",
        "n.json:1:49: nodeconfig[0].devicesplitcount: a whole number from 0 is expected, not `0.5`",
        "n.json:2:22: nodeconfig[1].devicesplitcount: a whole number from 0 is expected, not `0.5`",
    ]
    assert expected == errors


def test_run_says_it_in_one_sentence(tmp_path, monkeypatch, capsys):
    file, *_ = written(tmp_path, monkeypatch, **WRONG)

    assert 78 == dispatch(["run", "--config", file, "--state-dir", str(tmp_path)], {})

    (line,) = capsys.readouterr().err.splitlines()
    assert "c.yaml:1:11: unknown setting sharing.splitCuont" in line
    assert line.endswith("(and 6 more)")


OBJECT = "this is a Kubernetes object, not a settings file; give the file in its ConfigMap"


@pytest.mark.parametrize("name", ["cm.yaml", "cm.json", "cm"])
@pytest.mark.parametrize("flag", ["", "--config", "--device-config", "--nodeconfig"])
def test_a_whole_configmap_is_refused_by_every_reader(tmp_path, capsys, name: str, flag: str):
    file = tmp_path / name
    file.write_text('{"apiVersion": "v1", "kind": "ConfigMap", "data": {"config.json": "{}"}}')

    if flag:
        assert 78 == dispatch(["config", "show", flag, str(file)], {})
        said = capsys.readouterr().err
    else:
        said = checked(capsys, str(file), code=1)[1]
    assert f"hami-agent: {file}:1:1: {OBJECT}\n" == said


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        *((name, '{"sharing": {"splitCount": 4}}', "1:28") for name in ("o.json", "o.yaml", "o")),
        ("d.yaml", "{nvidia: {deviceSplitCount: 4}}", "1:29"),
        ("c.yaml", "{sharing: {splitCount: 4}}  # {{ x }}\n", "1:24"),
        ("-", "nvidia:\n  deviceSplitCount: 4\n", "2:21"),
    ],
)
def test_a_file_is_recognised_by_its_content(tmp_path, monkeypatch, capsys, name, text, place):
    monkeypatch.setattr("agent.cli.config.STDIN", Path("in"))
    file = "in" if name == "-" else name
    written(tmp_path, monkeypatch, **{file: text})
    out, err = checked(capsys, name, "--node", "n")

    assert "" == err
    assert f"  sharing.splitCount  4      {file}:{place}" in out.splitlines()


MIG = '{"nodeconfig": [\n{"name": "a", "operatingmode": "mig"}, {"name": "b"}]}'


def test_a_node_that_would_have_no_slices_is_no_good_one(tmp_path, monkeypatch, capsys):
    files = written(tmp_path, monkeypatch, **{"n.json": MIG})

    out, err = checked(capsys, *files, code=1)

    assert "" == out
    assert (
        "hami-agent: n.json:2:32: sharing.operatingMode: the agent does not share GPUs in mode mig "
        "yet: the node has no slices; set hami-core or mps, or run HAMi's plugin there\n"
    ) == err
    assert "b: all defaults" in checked(capsys, *files, "--node", "b")[0]


SELECTED = {
    "nodeconfig": [
        {"nodelabelselector": {"matchLabels": {"Pool": "x"}}, "devicesplitcount": 4},
        {"name": "*", "devicesplitcount": 3},
        {"name": "b", "operatingmode": "unknown"},
    ]
}


def test_what_selects_by_labels_needs_labels_and_that_is_told(tmp_path, monkeypatch, capsys):
    files = written(tmp_path, monkeypatch, **{"n.json": json.dumps(SELECTED)})
    row = "  sharing.splitCount  {}"

    out, err = checked(capsys, *files, "--node", "a")
    assert any(line.startswith(row.format(3)) for line in out.splitlines())
    assert "note: the profile at n.json:1:17 is left out: it needs labels" in err
    out, err = checked(capsys, *files, "--node", "a", "--label", "Pool=x")
    assert any(line.startswith(row.format(4)) for line in out.splitlines())
    assert "note" not in err
    assert "warning: n.json:1:164: sharing.operatingMode: expected one of" in err

    for asked in ((), ("--node", "b")):
        assert "n.json:1:164: sharing.operatingMode" in checked(capsys, *files, *asked, code=1)[1]

    flags = ("--nodeconfig", *files, "--device-config", "", "--node-name", "a")
    assert 0 == dispatch(["config", "show", "--diff", *flags], {})
    shown = capsys.readouterr()
    assert "note: what selects by labels is left out" in shown.err
    assert "sharing.splitCount" in shown.out


# A narrow screen and a pipe: every value and every place is there.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_shows_every_value_and_every_place(
    tmp_path, monkeypatch, capsys, columns: int
) -> None:
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path / "d")
    file = "a-file-with-quite-a-name.yaml"
    uuids = [f"GPU-{number:032}" for number in range(3)]
    Path(file).write_text(f"sharing:\n  splitCount: 8\n  filterUUIDs: {uuids}\n")
    assert 0 == dispatch(["config", "check", file, "--node", "n"], {})
    piped = capsys.readouterr().out.splitlines()
    assert f"  sharing.filterUUIDs  {json.dumps(uuids)}  {file}:3:16" in piped
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns, 24)))

    assert 0 == dispatch(["config", "check", file, "--node", "n"], {})
    assert 0 == dispatch(["config", "show", "--origin", "--diff", "--config", file], {})

    lines = screen.getvalue().splitlines()
    assert 2 == sum(line.rstrip().endswith(f"{file}:2:15") for line in lines)
    assert 2 == sum(line.rstrip().endswith(f"{file}:3:16") for line in lines)
    assert 2 == sum(json.dumps(uuids) in line for line in lines)
    assert all(len(line) <= columns for line in lines if uuids[0] not in line)


# Command lines and environments that were made for HAMi's plugin: taken, told of, or refused.

CHART = (
    "--mig-strategy=none --disable-core-limit=false -v=4 --v=false "
    "--device-id-strategy=uuid --device-discovery-strategy auto --imex-required=false "
    "--node-name=n"
)


@pytest.mark.parametrize("switch", ["--pass-device-specs", "--pass-device-specs=true"])
@pytest.mark.parametrize("flag", ["--config-file", "--device-config"])
def test_a_command_line_of_hamis_chart_is_taken(files, capsys, switch: str, flag: str):
    words = [*CHART.split(), switch, "--report-node-capacity", f"{flag}=device.yaml"]
    assert 0 == dispatch(["config", "show", "--diff", "--origin", *words], {})

    out = capsys.readouterr()
    assert [
        ["node.name", "n", "--node-name"],
        ["files.deviceConfig", "device.yaml", "--device-config"],
        ["sharing.memoryScaling", "1.5", "device.yaml:2:24"],
        ["allocation.passDeviceSpecs", "true", "--pass-device-specs"],
    ] == [line.split() for line in out.out.splitlines()[1:]]
    assert [
        "hami-agent: warning: device.yaml:3:3: nvidia: unknown key `deviceColour`",
        "hami-agent: warning: --report-node-capacity: has no effect here",
        "hami-agent: warning: -v: has no effect here",
    ] == out.err.splitlines()
