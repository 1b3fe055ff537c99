"""`doctor`: one line for each thing, an exit code, and the same as JSON."""

import json
from pathlib import Path

import pytest

from agent.cli import doctor
from agent.cli.main import dispatch
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


def test_what_could_not_be_checked_has_an_exit_code_of_its_own(
    flags, tmp_path, capsys, monkeypatch
):
    """An agent that runs says itself what it lacks of the API server."""
    (kubeconfig := tmp_path / "kubeconfig").write_text("{}")
    monkeypatch.setattr(doctor, "_ask_agent", lambda _: StatusDocument(NodeStatus(name="n"), ()))
    only = ("doctor", *flags, "--scheduler", "hami", "--only", "api")

    assert 5 == dispatch((*only, "--kubeconfig", str(kubeconfig)), {})
    assert "0 wrong, 0 notes, 0 ok, 1 not checked" in capsys.readouterr().out
