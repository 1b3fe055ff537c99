"""What the chart makes of each row of values, against tests/golden/chart.txt.

A row is what it changes of what the least values give: a line for each leaf of an object, of the
settings that the agent reads in its file, and of the notes. `make manifests` writes it.
"""

import itertools
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from agent import __version__
from agent.ledger import SourceFile
from agent.settings.reading import Sources, make_plan
from tests.chart.lab.helm import CHART, NEWEST, ROOT, Helm, Object, Values, of_kind, the
from tests.chart.lab.values import LEAST, MATRIX, RENDERED, values

GOLDEN = ROOT / "tests" / "golden" / "chart.txt"


def leaves(value: object, path: str) -> Iterator[str]:
    """A line for each leaf; an entry of a list is named by its own name, if it has one."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from leaves(one, f"{path}.{key}")
    elif isinstance(value, list) and value:
        for number, one in enumerate(value):
            name = one.get("name", number) if isinstance(one, dict) else number
            yield from leaves(one, f"{path}[{name}]")
    else:
        yield f"{path} = {json.dumps(value)}"


def settings(text: str) -> Iterator[str]:
    """What the agent reads in the file."""
    plan = make_plan(Sources(own=SourceFile("config.yaml", text.encode())))
    plan.resolve()
    yield from (f"setting {one.field.key} = {one.value!r}" for one in plan.base)
    for profile in plan.profiles:
        given = {one.field.key: one.value for one in profile.settings}
        yield f"profile {profile.name} of {profile.nodes}: {given}"


def told(objects: Sequence[Object]) -> Counter[str]:
    """All lines of a rendering, whatever its objects are called."""
    name = the(objects, "DaemonSet")["metadata"]["name"]
    lines = [f"name = {name}"]
    for one in objects:
        called = f"{one['kind']} {one.get('metadata', {}).get('name', '')}"
        for key in ("text", *one.get("data", {})):
            text = one.get("text", "") if key == "text" else one["data"].pop(key)
            if key == "config.yaml":
                lines += settings(text)
            elif key != "hami-agent.json":
                lines += [f"{called} {key}: {line}" for line in text.splitlines() if line]
        if one["kind"] == "PrometheusRule":
            one["spec"]["groups"] = len(one["spec"]["groups"])
        lines += leaves({key: part for key, part in one.items() if key != "text"}, called)
    known = (line.replace(name, "NAME").replace(__version__, "VERSION") for line in lines[1:])
    return Counter([*lines[:1], *known])


OBJECT = re.compile(r"([A-Z]\w+ [\w-]*|\w+)(.*)([+-])")
ROWS: Mapping[str, tuple[Values, str]] = {
    **{name: (values(name), NEWEST) for name in MATRIX},
    **{
        name: ({**LEAST, **row["values"]}, str(row["kubernetes"])) for name, row in RENDERED.items()
    },
}


def golden_lines(helm: Helm, name: str) -> list[str]:
    """A row with its values, and what is other than with the least ones, which are shown whole."""
    given, kubernetes = ROWS[name]
    found = told(helm.everything(given, kubernetes))
    base = told(helm.everything(LEAST, NEWEST)) if name != "least" else Counter[str]()
    changes = [f"{line}-" for line in (base - found).elements()]
    changes += [f"{line}+" for line in (found - base).elements()]
    lines = [f"== {name}: {json.dumps(given)} on {kubernetes}"]
    parts = sorted(OBJECT.findall(line)[0] for line in changes)
    left = {OBJECT.findall(f"{line}+")[0][0] for line in found}
    for called, of_object in itertools.groupby(parts, lambda one: one[0]):
        rows = [f"{sign}{path}" for _, path, sign in of_object]
        lines += [f"@ {called}", *rows] if called in left else [f"@ {called} is gone"]
    return lines


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_values_gives_what_it_gave(helm, name):
    lines = GOLDEN.read_text().splitlines()
    begins = [place for place, line in enumerate(lines) if line.startswith("== ")]
    parts = [lines[start:end] for start, end in itertools.pairwise([*begins, len(lines)])]

    assert [*ROWS] == [part[0].removeprefix("== ").partition(': {"')[0] for part in parts]
    assert parts[[*ROWS].index(name)] == golden_lines(helm, name)


def test_a_scaling_may_be_a_text_as_helms_set_gives_a_fraction(helm):
    """Of HAMi's names, of the agent's own, and of a profile."""
    scales = ("devicePlugin.deviceMemoryScaling=1.5", "config.sharing.coreScaling=0.05")
    profile = ["name=p", "match.nodes[0]=a", "sharing.memoryScaling=1.5", "sharing.splitCount=7"]
    given = ["image.repository=kept", *scales, *(f"config.profiles[0].{one}" for one in profile)]
    found = of_kind(helm.told("agent", CHART, given), "ConfigMap")["agent-hami-agent"]["data"]
    read = yaml.safe_load(found["config.yaml"])

    assert {"memoryScaling": 1.5, "coreScaling": 0.05} == read["sharing"]
    assert {"memoryScaling": 1.5, "splitCount": 7} == read["profiles"][0]["sharing"]


def test_what_the_notes_tell_to_add_lets_one_more_scrape(helm):
    notes = helm.notes(values("monitor"), NEWEST)
    told = notes[notes.index("\n  networkPolicy:") :]
    found = helm.objects({**values("monitor"), **yaml.safe_load(told)})
    rules = of_kind(found, "NetworkPolicy")["agent-hami-agent"]["spec"]["ingress"]

    # Who was let in stays so, and NAME comes in.
    assert [
        {"namespaceSelector": {}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "NAME"}}},
    ] == rules[0]["from"][2:]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as room:
        tools = Path(os.environ["HAMI_CHART_TOOLS"])  # noqa: TID251 -- said by who runs it
        helm = Helm(tools / "helm", Path(room))
        lines = [line for name in ROWS for line in golden_lines(helm, name)]
        GOLDEN.write_text("\n".join(lines) + "\n")
    sys.stdout.write(f"{len(lines)} lines\n")
