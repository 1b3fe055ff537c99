"""`completion`: what a shell offers after the words that are typed, asked of the shell itself."""

import asyncio
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from agent.cli import support
from agent.cli.main import VERBS, dispatch
from agent.status import AllocationStatus, GpuStatus, NodeStatus, StatusDocument, envelope
from tests.builders import NOON
from tests.fakes.explain_rig import a_gpu

pytestmark = pytest.mark.looptime(False)

BASH = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_hami_agent
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
compdef() {{ :; }}
compadd() {{ shift; print -l -- "${{(@M)argv:#${{words[CURRENT]}}*}}"; }}
_files() {{ :; }}
source {script}
words=({words})
CURRENT=${{#words}}
_hami_agent
"""
FISH = """
source {script}
complete --do-complete {line} | string split --fields 1 \\t
"""
SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if shutil.which(name) is None:
        pytest.skip(f"this machine has no {name}")
    return name


def offered(shell: str, typed: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What it offers for the last word of what is typed."""
    assert 0 == dispatch(["completion", shell], {})
    script = folder / "script"
    script.write_text(capsys.readouterr().out)
    words = " ".join(shlex.quote(word) for word in typed.split(" "))
    line = shlex.quote(typed)
    command = SHELLS[shell].format(script=shlex.quote(str(script)), words=words, line=line)
    (folder / "hami-agent").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m agent "$@"\n')
    (folder / "hami-agent").chmod(0o755)
    ended = subprocess.run(  # noqa: S603 -- the shell of this machine
        [shutil.which(shell) or shell, "-c", command],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
        env={"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder)},
    )
    assert "" == ended.stderr
    return {line for line in ended.stdout.splitlines() if line}


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("hami-agent ", {*VERBS}),
        ("hami-agent doc", {"doctor"}),
        ("hami-agent config ", {"show", "check", "schema"}),
        ("hami-agent config s", {"show", "schema"}),
        ("hami-agent doctor --pre -o ", {"table", "wide", "json", "yaml"}),
        ("hami-agent doctor -o y", {"yaml"}),
        ("hami-agent config show -o ", {"table", "json", "yaml"}),
        ("hami-agent completion z", {"zsh"}),
        ("hami-agent doctor --str", {"--strict"}),
        ("hami-agent cordon 3 --no", {"--node"}),
        ("hami-agent doctor --config ", set()),
        ("hami-agent cordon ", set()),
        ("hami-agent config check doctor --lab", {"--label"}),
        ("hami-agent nothing ", set()),
        ("hami-agent runbook HA-40", {f"HA-400{number}" for number in range(1, 7)}),
        ("hami-agent run --pass-device-specs --lo", {"--log-level", "--log-format"}),
    ],
)
def test_what_is_offered_after_the_words_that_are_typed(typed, expected, capsys):
    words = typed.split(" ")[1:]
    assert 0 == dispatch(["completion", "bash", "--", "--", *words], {})

    found = capsys.readouterr().out.splitlines()
    assert expected == {word for word in found if word.startswith(words[-1])}


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("hami-agent config s", {"show", "schema"}),
        ("hami-agent doctor --str", {"--strict"}),
        ("hami-agent nothing ", set()),
    ],
)
def test_the_shell_offers_of_these_what_begins_as_typed(shell, typed, expected, tmp_path, capsys):
    assert expected == offered(shell, typed, tmp_path, capsys)


def test_an_option_that_is_accepted_and_not_shown_is_not_offered():
    found = support.may_follow(["uninstall", "--"], {})

    assert {"--force", "--all-nodes"} <= set(found)
    assert "--split-count" not in found


NODE = StatusDocument(
    NodeStatus("n-1"),
    (GpuStatus("GPU-a", index=10), GpuStatus("GPU-b", index=2), GpuStatus("GPU-c")),
    tuple(AllocationStatus("demo", pod, "main", ()) for pod in ("one", "one", "$(reboot)", "")),
)
OTHER = StatusDocument(NodeStatus("n-2"), (GpuStatus("GPU-d", index=3),))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("cordon", ""), ["GPU-c", "2", "3", "10"]),
        (("uncordon", "2", "--node", ""), ["n-1", "n-2"]),
        (("status", "--node", "n"), ["n-1", "n-2"]),
        (("explain", ""), ["demo/one"]),  # bash would run the other name
    ],
)
def test_gpus_pods_and_nodes_are_offered_as_status_has_them(words, expected, monkeypatch):
    told = envelope("Nodes", (NODE, OTHER), NOON)
    ended = subprocess.CompletedProcess((), 5, told)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)

    assert expected == list(support.may_follow(words, {}))


async def test_explain_offers_the_pending_pods_that_ask_for_gpus(rig, monkeypatch):
    monkeypatch.setattr(support, "_seen", list)
    rig.node("n1", a_gpu("GPU-a"))
    rig.holder("runs", "n1", "GPU-a")
    rig.submit("waits", {"nvidia.com/gpumem": 1000})
    rig.submit("other", {"cpu": 1})

    environ = {"KUBECONFIG": str(rig.kubeconfig)}
    found = await asyncio.to_thread(support.may_follow, ["explain", ""], environ)
    assert ["default/waits"] == found


@pytest.mark.parametrize(
    "failure", [subprocess.TimeoutExpired("agent", 3), OSError(), msgspec.DecodeError()]
)
def test_where_nothing_answers_nothing_is_offered(failure, monkeypatch):
    def run(*_, **__):
        raise failure

    monkeypatch.setattr(subprocess, "run", run)

    assert [] == list(support.may_follow(["cordon", ""], {}))
