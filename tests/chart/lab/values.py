"""The values that the chart is rendered with, and those that it refuses; values.yaml has them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.chart.lab.helm import Values

IMAGE: Final[Values] = {"repository": "example/hami-agent"}
LEAST: Final[Values] = {"image": IMAGE}
"""What nobody else can know."""
_ROWS: Final = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
MATRIX: Final[Mapping[str, Values]] = _ROWS["matrix"]
"""By name; each is laid over LEAST."""
RENDERED: Final[Mapping[str, Mapping[str, Any]]] = {
    name: {"kubernetes": "1.37", "values": row} if "kubernetes" not in row else row
    for name, row in _ROWS["rendered"].items()
}
"""More rows, each with the Kubernetes that it is for; only tests/chart/test_golden.py has them."""
REFUSED: Final[Mapping[str, tuple[Values, str]]] = _ROWS["refused"]
"""Values that are refused, each with a word of the refusal."""


def values(name: str) -> Values:
    """One row of the matrix, with the image."""
    return {**LEAST, **MATRIX[name]}
