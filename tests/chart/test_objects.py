"""Whatever the values: Helm is content, every Kubernetes takes the objects, and no check is left
unanswered."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.chart.lab.helm import CHART, Helm, parsed
from tests.chart.lab.programs import ran
from tests.chart.lab.schemas import VERSIONS, write_schemas
from tests.chart.lab.values import MATRIX, REFUSED, values

STRANGERS: Final = "PodMonitor,PrometheusRule,ServiceMonitor"
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
def test_helm_finds_nothing_to_object_to(helm: Helm, name: str):
    assert "" == helm.lint(values(name))


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_values_are_refused_by_name(helm: Helm, case: str):
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


@pytest.mark.parametrize("version", VERSIONS)
def test_each_kubernetes_takes_the_objects(
    programs: Path, helm: Helm, version: str, tmp_path: Path
):
    folder = tmp_path / "schemas"
    folder.mkdir()
    files = []
    for number, name in enumerate(MATRIX):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(helm.text(values(name), alike(version)))
    kinds = {one["kind"].lower() for file in files for one in parsed(file.read_text())}
    write_schemas(version, folder, frozenset(kinds))

    done = ran(
        programs / "kubeconform",
        "-strict",
        f"-skip={STRANGERS}",
        f"-schema-location={folder}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json",
        *files,
    )

    assert ("", 0) == (done.stdout + done.stderr, done.returncode)


def test_the_schemas_refuse_what_kubernetes_refuses(programs: Path, helm: Helm, tmp_path: Path):
    write_schemas("1.36", tmp_path, frozenset({"daemonset"}))
    text = helm.text(values("least"), hooks=False)
    misspelt = text.replace("terminationGracePeriodSeconds", "terminationGraceSeconds")
    mistyped = text.replace(
        "automountServiceAccountToken: false", "automountServiceAccountToken: 1"
    )
    assert text not in {misspelt, mistyped}

    for wrong in (misspelt, mistyped):
        (tmp_path / "wrong.yaml").write_text(wrong)
        done = ran(
            programs / "kubeconform",
            "-ignore-missing-schemas",
            f"-schema-location={tmp_path}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json",
            tmp_path / "wrong.yaml",
        )
        assert 1 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", MATRIX)
def test_a_critic_has_nothing_that_is_not_answered(
    programs: Path, helm: Helm, name: str, tmp_path: Path
):
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
