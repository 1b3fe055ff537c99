"""The C stub of the driver's library, for whole agents over a real one."""

import shutil
from pathlib import Path

import pytest

from tests.fakes.nvml_fixtures import built

__all__ = ["built"]


@pytest.fixture
def library(built: Path, tmp_path: Path) -> Path:
    """The stub where drivers have it."""
    return Path(shutil.copy(built, tmp_path / "libnvidia-ml.so.1"))
