"""Running a program to its end."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SECONDS: Final = 60.0

Ended = subprocess.CompletedProcess[str]


def ran(*command: str | Path, environ: Mapping[str, str] | None = None) -> Ended:
    """The exit code and what it said. Raises subprocess.TimeoutExpired: it does not end."""
    return subprocess.run(  # noqa: S603 -- programs that tests/chart/build made
        command, env=environ, check=False, capture_output=True, text=True, timeout=SECONDS
    )
