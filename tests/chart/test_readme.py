"""Every command of deploy/README.md that names the chart gives objects."""

import itertools
import json
import re
import shlex
from typing import Any

import pytest

from tests.chart.lab.helm import ROOT, Helm, pod_of
from tests.shape import tree

CHART = "deploy/chart/hami-agent"
BLOCKS = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    text = "".join(BLOCKS.findall(tree.text("deploy/README.md"))).replace("\\\n", " ")
    words = [shlex.split(line) for line in text.splitlines()]
    return [one for one in words if one[0] == "helm" and CHART in one]


def settings(command: list[str]) -> list[str]:
    """What it sets; what an upgrade keeps is the image."""
    given = [word for flag, word in itertools.pairwise(command) if flag == "--set"]
    return given if "install" in command else ["image.repository=kept", *given]


def test_there_are_commands_at_all():
    assert {"install", "upgrade"} == {command[1] for command in commands()}


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_command_gives_what_it_says(helm: Helm, command: list[str]):
    found = helm.told(command[2], ROOT / command[3], settings(command))

    assert pod_of(found)["containers"]


def test_every_name_of_a_value_is_one():
    sections = "config devicePlugin driver hami image library networkPolicy podDisruptionBudget"
    names = rf"`((?:{sections.replace(' ', '|')})\.(?!io/|json|needs|enabled)[A-Za-z.]+)"
    told = re.findall(names, tree.text("deploy/README.md"))
    schema = json.loads(tree.text(f"{CHART}/values.schema.json"))

    assert len(set(told)) > 10
    assert [] == [name for name in told if not is_known(schema, name)]


def is_known(schema: dict[str, Any], name: str) -> bool:
    """Whether the values have such a name."""
    here = schema
    for word in name.split("."):
        target = here.get("$ref", "").rpartition("/")[2]
        here = (schema["$defs"][target] if target else here).get("properties", {}).get(word)
        if here is None:
            return False
    return True
