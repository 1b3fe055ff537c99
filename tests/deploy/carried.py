"""The Python program that the chart carries, as a module."""

import importlib.util
from types import ModuleType
from typing import Final

from tests.shape import tree

SCRIPT: Final = tree.ROOT / "deploy/chart/hami-agent/files/uninstall.py"


def uninstall() -> ModuleType:
    """What runs after the chart is gone."""
    spec = importlib.util.spec_from_file_location("uninstall", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
