"""Whatever the values: Helm is content, every Kubernetes takes the objects, and no check is left
unanswered."""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.chart.lab.helm import CHART, Object, the
from tests.chart.lab.programs import ran
from tests.chart.lab.values import MATRIX, REFUSED, values

SCHEMAS: Final = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
VERSIONS: Final = tuple(f"1.{minor}" for minor in range(26, 38))
STRANGERS: Final = {"PodMonitor", "PrometheusRule", "ServiceMonitor"}
"""Kinds that Kubernetes does not have of itself."""
UNANSWERED: Final[Mapping[str, str]] = {
    "container-ephemeral-storage-request-and-limit": "the agent writes to host paths alone",
    "container-image-pull-policy": "nodes without a registry pull nothing",
    "container-security-context-user-group-id": "the kubelet's sockets belong to root",
    "service-type": "NodePort on demand, for dashboards that ask HAMi's monitor there",
    "pod-networkpolicy": "egress on demand: no chart knows the ports of an API server",
}
"""What kube-score would have, and why it is not so."""


@pytest.mark.parametrize("name", MATRIX)
def test_helm_finds_nothing_to_object_to(helm, name):
    assert "" == helm.lint(values(name))


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_values_are_refused_by_name(helm, case):
    wrong, word = REFUSED[case]

    assert word in helm.refusal({**values("least"), **wrong})


def alike(version: str) -> str:
    """The oldest version for which the chart gives the same: where the templates compare none."""
    templates = "".join(file.read_text() for file in sorted((CHART / "templates").iterdir()))
    steps = {VERSIONS[0], *re.findall(r'semverCompare ">=([0-9.]+)\.0-0"', templates)}
    assert len(steps) > 1
    assert templates.count("semverCompare") >= len(steps) - 1
    return max((step for step in steps if minor(step) <= minor(version)), key=minor)


def minor(version: str) -> int:
    return int(version.partition(".")[2])


@functools.cache
def definitions(version: str) -> Registry[Any]:
    """What the schemas of that Kubernetes share."""
    text = (SCHEMAS / f"v{version}.0-local-strict" / "_definitions.json").read_bytes()
    return (Resource.from_contents(json.loads(text)) @ Registry()).crawl()


def objections(one: Object, version: str) -> list[str]:
    """What that Kubernetes has against it. Raises FileNotFoundError: it has no such kind."""
    group, _, revision = one["apiVersion"].rpartition("/")
    name = "-".join(filter(None, (one["kind"].lower(), group.partition(".")[0], revision)))
    schema = json.loads((SCHEMAS / f"v{version}.0-local-strict" / f"{name}.json").read_bytes())
    judge = Draft202012Validator(schema, registry=definitions(version))
    return [error.message for error in judge.iter_errors(one)]


@pytest.mark.parametrize("version", VERSIONS)
def test_each_kubernetes_takes_the_objects(helm, version):
    given = (helm.objects(values(name), alike(version)) for name in MATRIX)
    objects = map(json.loads, {json.dumps(one) for row in given for one in row})
    own = (one for one in objects if one["kind"] not in STRANGERS)

    assert [] == [found for one in own for found in objections(one, version)]


def test_the_schemas_refuse_what_kubernetes_refuses(helm):
    agents = the(helm.objects(values("least")), "DaemonSet")
    assert [] == objections(agents, "1.36")
    agents["spec"]["template"]["spec"] |= {"misspelt": 1, "automountServiceAccountToken": 1}

    assert 2 == len(objections(agents, "1.36"))


@pytest.mark.parametrize("name", MATRIX)
def test_a_critic_has_nothing_that_is_not_answered(programs, helm, name, tmp_path):
    file = tmp_path / "all.yaml"
    file.write_text(helm.text(values(name)))

    done = ran(
        *(programs / "kube-score", "score", "--kubernetes-version=v1.36"),
        *("--output-format=json", "--ignore-container-cpu-limit"),
        *(f"--ignore-test={check}" for check in UNANSWERED),
        file,
    )
    wanting = {
        (one["object_name"], check["check"]["id"])
        for one in json.loads(done.stdout)
        for check in one["checks"]
        if not check["skipped"] and check["grade"] < 10
    }

    assert set() == wanting
