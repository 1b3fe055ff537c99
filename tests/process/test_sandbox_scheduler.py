"""`hami-agent sandbox scheduler` as a process: its first line, its log, its end."""

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.sandbox.lab.cluster import kubeconfig
from tests.fakes.extender_rig import TLS, ExtenderRig, a_cluster
from tests.process.agent_process import ENVIRON, PATIENCE, ROOT, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(60), pytest.mark.looptime(False)]


IGNORING = ("/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh")
"""Starts a command as `command &` in a script does, and some runners of CI: SIGINT is ignored."""


@contextlib.asynccontextmanager
async def serving(rig: ExtenderRig, *arguments: str) -> AsyncIterator[tuple[Process, str]]:
    """The process and the address that it printed."""
    rig.kubeconfig.write_text(kubeconfig(rig.api.url, "t"))
    words = ("sandbox", "scheduler", "--kubeconfig", str(rig.kubeconfig), *arguments)
    child = await asyncio.create_subprocess_exec(
        *(*IGNORING, sys.executable, "-m", "agent", *words),
        cwd=ROOT,
        env=ENVIRON,
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(PATIENCE):
            line = (await child.stdout.readline()).decode()
        assert line.startswith("listening on http")
        yield child, line.removeprefix("listening on ").rstrip()
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_it_ends_when_it_is_told_to_whatever_its_parent_ignored(
    tmp_path: Path, number: int, code: int
) -> None:
    async with a_cluster(tmp_path) as rig, serving(rig) as (child, _):
        child.send_signal(number)
        async with asyncio.timeout(PATIENCE):
            _, said = await child.communicate()

    assert code == child.returncode
    assert b"Traceback" not in said


async def test_an_address_that_cannot_be_bound_is_one_sentence(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as rig, serving(rig) as (_, address):
        # The second is an address that no machine has.
        for where in (address.removeprefix("http://"), "[2001:db8::7]:80"):
            words = ("--kubeconfig", str(rig.kubeconfig), "--listen", where)
            ended = await asyncio.to_thread(run, "sandbox", "scheduler", *words)

            assert 1 == ended.returncode
            said = f"hami-agent sandbox scheduler: --listen {where}: cannot be bound ("
            assert said in ended.stderr
            assert "Traceback" not in ended.stderr


async def test_a_later_failure_is_not_called_one_of_the_address(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as rig:
        rig.kubeconfig.write_text(kubeconfig(rig.api.url, "t"))
        words = ("sandbox", "scheduler", "--kubeconfig", str(rig.kubeconfig))
        with Path("/dev/full").open("wb") as full:  # noqa: ASYNC230 -- a device, opened at once
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agent", *words),
                cwd=ROOT,
                env=ENVIRON,
                stdout=full,
                stderr=PIPE,
            )
        async with asyncio.timeout(PATIENCE):
            _, said = await child.communicate()

    assert 74 == child.returncode
    assert b"standard output cannot be written: No space left on device" in said
    assert b"Traceback" not in said
    assert b"cannot be bound" not in said


async def test_each_decision_is_a_line_of_the_log(tmp_path: Path) -> None:
    tls = ("--tls-cert", str(TLS / "one.crt"), "--tls-key", str(TLS / "one.key"))
    async with a_cluster(tmp_path) as rig, serving(rig, *tls) as (child, address):
        rig.create_pod("p")
        async with rig.calling(address):
            await rig.filter("p")
            await rig.bind("p")
            await rig.review({"metadata": {}, "spec": {"containers": []}})
        child.terminate()
        async with asyncio.timeout(PATIENCE):
            _, said = await child.communicate()

    lines = [json.loads(line) for line in said.splitlines()]
    told = {line["event"]: line for line in lines}
    assert {"scheduler.pod_filtered", "scheduler.pod_bound", "scheduler.pod_reviewed"} <= set(told)
    assert ("p", "n1") == (told["scheduler.pod_bound"]["pod"], told["scheduler.pod_bound"]["node"])
