"""`hami-agent sandbox` as a new user runs it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.cli.main import dispatch, parser_of
from agent.cli.sandbox import MEASURES
from agent.sandbox.lab.cluster import NAMESPACE, open_cluster
from agent.sandbox.scenario.default import OPENING, act, open_stage
from agent.sandbox.scenario.stage import promises
from tests.process.agent_process import ENVIRON, PATIENCE, ROOT, options, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

WITHIN = 160
"""Seconds for a scenario: just under the test's own."""


def commands(told: list[str]) -> list[str]:
    """The verbs of the command lines in it, each of which this program takes."""
    lines = [shlex.split(line) for line in told if f" {sys.executable} -m agent " in line]
    return [parser_of(words[0]).parse_args(words).verb for _, _, _, *words in lines]


@pytest.mark.slow
def test_every_claim_of_the_default_scenario_is_true_and_the_document_has_it_all():
    ended = run("sandbox", "-o", "json", within=WITHIN)
    found = json.loads(ended.stdout)
    data, promised = found["data"], promises(8, 10)

    untrue = [claim for claim in data["claims"] if not claim["ok"]]
    assert [] == untrue, "\n".join(data["agentLog"])
    assert (0, True) == (ended.returncode, data["ok"])
    assert ("hami-agent/v1", "Sandbox") == (found["apiVersion"], found["kind"])
    assert {"ok", "claims", "timeline", "measured", "agentLog"} == data.keys()
    assert list(promised.items()) == [(one["id"], one["sentence"]) for one in data["claims"]]
    times = [moment["elapsed"] for moment in data["timeline"]]
    assert sorted(times) == times
    assert promised.keys() == {moment["claim"] for moment in data["timeline"]} - {""}
    assert set() == MEASURES.keys() - data["measured"].keys()


def test_an_agent_that_cannot_start_makes_it_fail_with_its_last_words():
    ended = run("sandbox", "--agent-flag=--kubeconfig=/absent", within=WITHIN)

    assert 1 == ended.returncode
    assert "the agent exited with 78" in ended.stdout
    assert '"event": "agent.failed"' in ended.stdout
    assert max(len(line) for line in ended.stdout.splitlines() if line[:1] == "t") <= 80


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--gpus", "3"), "24 slices on all GPUs but one, and there are 20; give --split-count 12"),
        (("--gpus", "64", "--split-count", "0"), "'0' is not a number from 1 to 1000"),
        (("--gpus", "1"), "3 to 64 GPUs, or any number from 1 with --interactive"),
        (("--gpus", "0", "--interactive"), "needs 1 to 64 GPUs"),
        (
            ("--gpus", "1", "--split-count", "4", "--interactive"),
            "and there are 4; give --split-count 5",
        ),
    ],
)
def test_too_few_gpus_or_slices_are_wrong_usage(words, expected, capsys):
    assert 2 == dispatch(["sandbox", *words], ENVIRON)
    assert expected in capsys.readouterr().err


@pytest.mark.looptime(False)
async def test_the_process_of_a_deleted_pod_uses_its_gpu_no_more():
    async with open_cluster(options(gpus=1)) as cluster:
        stage = open_stage(cluster, 10, lambda _: None)
        await act(stage, OPENING)
        (uuid,) = stage.gpus

        def used() -> int | None:
            return cluster.hardware.sample(uuid).used_mib

        assert (["one", "trio", "prepared"], 2304) == (stage.placed, used())
        cluster.store.delete("pods", NAMESPACE, "one")
        assert await cluster.until(lambda: used() == 1280, PATIENCE)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Sockets lie in it: pytest's own directories have names that are too long."""
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield Path(name)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_removes_everything(number: signal.Signals, code: int, temporary: Path):
    environ = ENVIRON | {"TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, "-m", "agent", "sandbox", "--interactive", "--gpus", "1"],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    ) as sandbox:
        assert sandbox.stdout is not None
        told = [sandbox.stdout.readline()]
        while not told[-1].startswith("  kubectl get node sandbox "):
            told.append(sandbox.stdout.readline())
        (killing,) = [place for place, line in enumerate(told) if line.startswith("  kill -9 ")]
        agent = int(told[killing].split()[-1])
        os.kill(agent, 0)  # it is there
        assert list(temporary.iterdir())
        assert any("after its cool-down: health.quietPeriod" in line for line in told)
        (log,) = [line.split()[-1] for line in told if line.startswith("  agent log")]
        assert '"event": "plugin.serving"' in Path(log).read_text(encoding="utf-8")

        sandbox.send_signal(number)
        sandbox.stdout.read()

    by_socket, by_cluster = (commands(lines) for lines in (told[:killing], told[killing:]))
    assert ["status", "status", "doctor", "bundle", *["simulate"] * 3] == by_socket
    assert ["explain", "status", "cordon"] == by_cluster
    assert told[killing + 1].startswith(f"  export KUBECONFIG={temporary}/")
    assert code == sandbox.returncode
    assert [] == list(temporary.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(agent, 0)
