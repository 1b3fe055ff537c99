"""What this machine and these libraries need before the agent has done anything."""

import subprocess
import sys
import time
from pathlib import Path

from tests.bench.figures import Figure

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (
    ("python_floor", "python -c pass", "pass"),
    (
        "grpc_floor",
        "import of grpclib, betterproto2 and the messages",
        "import grpclib.server, agent.wire.v1beta1",
    ),
    ("import_floor", "import of the whole agent", "import agent.app.main"),
)


def floors(runs: int) -> list[Figure]:
    """Start an interpreter, import, exit: the part of the start that no code of ours can save."""
    return [
        Figure(name, what, "ms", [_run(program) for _ in range(runs + 1)][1:], "exec to exit")
        for name, what, program in PROGRAMS
    ]


def _run(program: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)  # noqa: S603 -- our own
    return (time.perf_counter() - begun) * 1000
