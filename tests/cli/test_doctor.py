"""`doctor`: one line for each thing, an exit code, and the same as JSON."""

import json
from pathlib import Path

import pytest
import yaml

from agent.cli import doctor
from agent.cli.main import dispatch
from agent.cli.support import HINT
from agent.status import NodeStatus, StatusDocument

pytestmark = pytest.mark.looptime(False)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """A host with simulated GPUs and no kubelet, in plain mode."""
    (tmp_path / "hook").mkdir(mode=0o755)
    return [
        *("--scheduler", "none", "--simulate", "h100:2", "--node-name", "n"),
        *("--kubelet-socket", str(tmp_path / "plugins/kubelet.sock")),
        *("--pod-resources-socket", str(tmp_path / "resources.sock")),
        *("--hook-path", str(tmp_path / "hook"), "--state-dir", str(tmp_path / "state")),
        *("--run-dir", str(tmp_path), "--device-config", "", "--nodeconfig", ""),
    ]


def test_each_line_says_what_was_looked_at_and_where_to_read_on(flags, capsys):
    assert 1 == dispatch(["doctor", "--pre", *flags], {})

    *lines, hint, total = capsys.readouterr().out.splitlines()
    firsts = [line for line in lines if not line.startswith(" ")]
    remedies = [line for line in lines if line.strip().startswith("to do: ")]
    assert {"note", "WRONG"} == {line.split()[1] for line in firsts}
    assert [f" [RUNBOOK {line.split()[2]}]" for line in firsts] == [
        line[line.rindex(" [") :] for line in remedies
    ]
    assert any("P-KUBELET" in line and line.endswith("plugins: does not exist") for line in firsts)
    assert HINT == hint
    assert f"{sum(' WRONG ' in line for line in firsts)} wrong" == total.split(",")[0]


@pytest.mark.parametrize(
    ("environ", "is_terminal", "coloured"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({}, False, False),
    ],
)
def test_verdicts_have_colours_on_a_terminal(
    flags, capsys, monkeypatch, environ, is_terminal, coloured
):
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    dispatch(["doctor", "--pre", *flags], environ)

    assert coloured is ("\x1b[31mWRONG\x1b[0m" in capsys.readouterr().out)


def test_nothing_is_changed(flags, tmp_path):
    before = sorted(tmp_path.rglob("*"))

    dispatch(["doctor", "--pre", *flags, "--run-dir", str(tmp_path / "run")], {})

    assert before == sorted(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--simulate", "unix:{}/gpus.sock"], "no simulated hardware answers at {}/gpus.sock"),
        (["--operating-mode", "mig"], "WRONG    P-SETTINGS   settings: --operating-mode: "),
        (["--operating-mode", "mig"], "has no slices"),
    ],
)
def test_what_the_flags_bring_is_told(flags, tmp_path, capsys, more, said):
    words = [word.format(tmp_path) for word in more]
    dispatch(["doctor", "--pre", "-o", "wide", *flags, *words], {})

    assert said.format(tmp_path) in capsys.readouterr().out


def test_refused_settings_are_all_that_is_said(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("sharing: {splitCount: many}\n")

    assert 1 == dispatch(["doctor", "--pre", "--config", str(tmp_path / "config.yaml")], {})

    line, *_, total = capsys.readouterr().out.splitlines()
    assert line.startswith("config     WRONG    P-SETTINGS")
    assert "config.yaml:1:" in line
    assert "1 wrong, 0 notes, 0 ok" == total


NODES = {"named": ["m", "n"]}


@pytest.mark.parametrize(
    ("words", "file", "verdict", "said"),
    [
        ((), "", "ok", "not there: the agent's own settings and defaults apply"),
        (("--pre",), "", "note", "not there: the agent's own settings and defaults apply"),
        (("--pre",), "named", "ok", "read"),
        *(
            ((*words, "--scheduler", "hami"), file, "note", "; annotations are not checked against")
            for words in ((), ("--pre",))
            for file in ("", "named")
        ),
    ],
)
def test_what_hamis_files_say_of_this_node_is_told(
    flags, tmp_path, capsys, words, file, verdict, said
):
    path = tmp_path / "config.json"
    if file:
        path.write_text(json.dumps({"nodeconfig": [{"name": name} for name in NODES[file]]}))
        words = (*words, "--nodeconfig", str(path))
    dispatch(["doctor", *flags, "--only", "config", "-o", "json", *words], {})
    findings = json.loads(capsys.readouterr().out)["data"]["findings"]

    (hami,) = [one for one in findings if one["id"] == "P-HAMI"]
    assert (verdict, True) == (hami["verdict"], said in hami["said"])
    assert ("mount the ConfigMaps" in hami["advice"]) == (hami["verdict"] == "note")


AGENT = (
    "/opt/python\0/opt/hami-agent/bin/hami-agent\0run\0--node-name\0gpu-1\0--split-count\0many\0"
)


@pytest.mark.parametrize(
    ("first", "words", "said"),
    [
        (AGENT.replace("many", "7"), (), "accepted, for Node gpu-1"),
        (AGENT.replace("many", "7"), ("--node-name", "n"), "accepted, for Node n"),
        (AGENT, (), "--split-count"),
        (AGENT, ("--split-count", "3"), "accepted, for Node gpu-1"),
        (AGENT.replace("run", "doctor"), ("--node-name", "n"), "accepted, for Node n"),
        ("/sbin/init\0", ("--node-name", "n"), "accepted, for Node n"),
        (None, ("--node-name", "n"), "accepted, for Node n"),
    ],
)
def test_in_the_agents_pod_its_own_options_count_where_none_is_given(
    tmp_path, capsys, monkeypatch, first, words, said
):
    """Those that a user added to the DaemonSet stand only on the agent's command line."""
    monkeypatch.setattr(doctor, "FIRST_PROCESS", tmp_path / "cmdline")
    if first is not None:
        (tmp_path / "cmdline").write_text(first)
    more = ("--scheduler", "none", "--run-dir", str(tmp_path), "--device-config", "")
    dispatch(["doctor", "--only", "config", "-o", "json", *more, "--nodeconfig", "", *words], {})

    (settings,) = [
        one
        for one in json.loads(capsys.readouterr().out)["data"]["findings"]
        if one["id"] == "P-SETTINGS"
    ]
    assert said in settings["said"]


def test_without_an_agent_it_is_the_agent_that_is_wrong(flags, capsys):
    assert 1 == dispatch(["doctor", *flags, "--only", "agent"], {})

    first, means, advice, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("agent      WRONG    P-AGENT      ")
    assert "api.sock: no agent answers: No such file or directory" in first
    assert means.strip() == "means: no new pod gets a GPU of this node; pods that run go on"
    assert advice.strip().startswith("to do: start it")
    assert advice.endswith("[RUNBOOK P-AGENT]")


def test_the_groups_can_be_chosen_before_the_first_start_too(flags, capsys):
    only = ("doctor", "--pre", *flags, "--only", "driver,config", "-o", "wide")
    assert 0 == dispatch(only, {})
    *lines, hint, total = capsys.readouterr().out.splitlines()
    firsts = [line for line in lines if not line.startswith(" ")]

    assert {"P-SETTINGS", "P-HAMI", "P-DRIVER"} == {line.split()[2] for line in firsts}
    assert (HINT, "0 wrong, 1 note, 2 ok") == (hint, total)
    assert 6 == dispatch((*only, "--strict"), {}), "with notes alone"
    assert 2 == dispatch(["doctor", "--only", "api,x"], {})
    assert "there is no group 'x'; the groups are config, driver," in capsys.readouterr().err


def test_what_could_not_be_checked_has_an_exit_code_of_its_own(
    flags, tmp_path, capsys, monkeypatch
):
    """An agent that runs says itself what it lacks of the API server."""
    (kubeconfig := tmp_path / "kubeconfig").write_text("{}")
    monkeypatch.setattr(doctor, "_ask_agent", lambda _: StatusDocument(NodeStatus(name="n"), ()))
    only = ("doctor", *flags, "--scheduler", "hami", "--only", "api")

    assert 5 == dispatch((*only, "--kubeconfig", str(kubeconfig)), {})
    assert "0 wrong, 0 notes, 0 ok, 1 not checked" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("words", [[], ["--pre"]])
def test_lines_are_folded_at_the_width_that_is_there(columns, words, flags, capsys):
    words = ["doctor", *words, *flags, "--node-name", "n\x1b[31m", "-o", "wide"]
    dispatch(words, {"COLUMNS": str(columns)})
    folded = capsys.readouterr().out
    dispatch(words, {})

    assert all(len(line) <= columns for line in folded.splitlines())
    whole = capsys.readouterr().out
    assert "".join(whole.split()) == "".join(folded.split())
    assert "P-SETTINGS" in whole
    assert "\x1b" not in whole, "nothing that a terminal obeys"


def test_the_same_as_yaml(flags, capsys):
    dispatch(["doctor", *flags, "-o", "json"], {})
    as_json = json.loads(capsys.readouterr().out)
    dispatch(["doctor", *flags, "-o", "yaml"], {})

    data = as_json["data"]
    assert data == yaml.safe_load(capsys.readouterr().out)["data"]
    assert ("Checkup", False, True) == (as_json["kind"], data["ok"], data["complete"])
    assert all(one["means"] for one in data["findings"] if one["verdict"] != "ok")
