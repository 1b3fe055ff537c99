"""What the agent loads before it registers: each module costs every start its time."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Final

import pytest

from agent.sandbox.lab.cluster import open_cluster
from tests.process.agent_process import PATIENCE, options

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(60)]

LISTED: Final = Path(__file__).parent / "modules_before_register.txt"
"""Every module of ours and of libraries, and what libraries look for in vain (rich, twisted)."""
OF_PYTHON: Final = 190
"""Modules of Python itself (3.11): they are only counted."""
LATE: Final = {"aiohttp", "email", "importlib.metadata", "kubernetes_asyncio", "yaml", "zipfile"}
"""Each takes 5 to 150 ms, and the registration needs none."""
ELSEWHERE: Final = {
    *("_distutils_hack", "google", "google.rpc", "google.rpc.status_pb2"),
    "apport_python_hook",
}
"""What a developer's environment has, or Python as Debian packs it; grpclib asks for Google."""
LINE: Final = re.compile(r"import time: +-?\d+ \| +-?\d+ \| +(\S+)$")


async def test_the_registration_waits_for_no_module_but_the_listed_ones():
    loaded = await loaded_before_serving()
    ours = {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names}
    ours -= ELSEWHERE
    listed = set(LISTED.read_text().split())

    assert not LATE & loaded
    new, gone = sorted(ours - listed), sorted(listed - ours)
    assert ([], []) == (new, gone), f"load it later, or list it in {LISTED.name} and say why"
    assert OF_PYTHON >= len(loaded - ours)


async def loaded_before_serving() -> set[str]:
    """The modules that the process loads until its socket serves; Register is the next step."""
    asked = options("--scheduler", "none", gpus=2)
    environ = {**asked.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    async with open_cluster(dataclasses.replace(asked, environ=environ)) as cluster:
        await cluster.start_agent()
        assert await cluster.until(lambda: cluster.allocatable() == 20, PATIENCE)
        lines = cluster.log.last(5000)
    end = next(at for at, line in enumerate(lines) if '"plugin.serving"' in line)
    return {found[1] for line in lines[:end] if (found := LINE.search(line))}
