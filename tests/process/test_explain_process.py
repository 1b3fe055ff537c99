"""`explain` as a process: its reader ends early, or its output is full."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.fakes.explain_rig import a_gpu, explain_rig
from tests.process.agent_process import ENVIRON, ROOT

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(60)]


async def run(kubeconfig: Path, stdout: int) -> tuple[int | None, bytes]:
    """Exit code and standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agent", "explain", "p", "--kubeconfig", str(kubeconfig)),
        cwd=ROOT,
        env=ENVIRON,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(50):
        _, said = await process.communicate()
    return process.returncode, said


async def test_a_reader_that_ended_gets_no_message_and_a_full_disk_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    async with explain_rig(tmp_path, capsys) as rig:
        rig.node("n1", a_gpu("GPU-a"))
        rig.submit("p", {"nvidia.com/gpu": 1})
        read, write = os.pipe()
        os.close(read)
        ended = await run(rig.kubeconfig, write)
        os.close(write)
        full = os.open("/dev/full", os.O_WRONLY)
        filled = await run(rig.kubeconfig, full)
        os.close(full)

    assert (128 + signal.SIGPIPE, b"") == ended
    sentence = b"hami-agent: standard output cannot be written: No space left on device\n"
    assert (74, sentence) == filled
