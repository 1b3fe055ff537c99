"""The expressions of the alerts and of the dashboard, as Prometheus is asked them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tests.shape import tree

FILES: Final = Path("deploy/chart/hami-agent/files")
RULES: Final = tree.ROOT / FILES / "rules.yaml"
DASHBOARD: Final = tree.ROOT / FILES / "dashboard.json"

METRIC: Final = re.compile(r"\b(?:hami_agent_|process_|up\b)\w*(?:\{[^}]*\})?")
GRAFANAS: Final = {"$node": ".*", "$instance": ".*", "$__rate_interval": "10s"}
"""What Grafana puts for its variables: everything, and a range of some scrapes."""


def alerts() -> Sequence[Mapping[str, Any]]:
    """All rules, in their order."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def selectors(expression: str) -> Sequence[str]:
    """The metrics that an expression reads, each with its matchers.

    A GPU has a series of its own condition alone, and a container one of its own policy; the other
    matchers are kept.
    """
    own = re.compile(r'(?<=[{,])(?:condition|policy)="[a-z]+"(?:, )?')
    return [own.sub("", one) for one in METRIC.findall(expression)]


def panels() -> Iterator[tuple[str, str]]:
    """Title and expression of all that the dashboard shows."""
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in GRAFANAS.items():
                expression = expression.replace(name, value)
            yield panel["title"], expression
