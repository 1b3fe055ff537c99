"""The C stub of the management library, built where there is a compiler."""

import shutil
import subprocess
from pathlib import Path

import pytest


def build(folder: Path) -> Path:
    """The library file, built in `folder`; skips the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) to build the stub library with")
    path = folder / "libnvidia-ml-stub.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(  # noqa: S603 -- the compiler that PATH names, on our own file
        [compiler, "-shared", "-fPIC", "-O1", "-o", path, source], check=True, timeout=60
    )
    return path
