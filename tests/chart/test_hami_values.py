"""What people carry over from the values of HAMi's chart for variables, the monitor and nodes."""

import json

import pytest

from tests.chart.lab.helm import Helm, container, environment, pod_of
from tests.chart.lab.values import LEAST, values

NAME = "hami's words for variables and the monitor"


def test_variables_by_name_are_variables(helm: Helm):
    found = environment(container(pod_of(helm.objects(values(NAME)))))
    field = {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
    given = {**LEAST, "devicePlugin": {"extraEnvs": [field]}}

    assert field in container(pod_of(helm.objects(given)))["env"]
    assert ("b", "4", "10000000", "true") == tuple(found[n] for n in ("A", "LEVEL", "LONG", "ON"))


def test_secrets_of_the_monitors_image_are_the_pods(helm: Helm):
    pod = pod_of(helm.objects(values(NAME)))

    assert [{"name": "theirs"}, {"name": "mine"}] == pod["imagePullSecrets"]
    # It stays without HAMi's privileges.
    dropped = container(pod, "vgpu-monitor")["securityContext"]["capabilities"]
    assert {"drop": ["ALL"]} == dropped


def test_a_directory_that_follows_from_the_hook_path_may_be_said(helm: Helm):
    given = {
        **LEAST,
        "global": {"gpuHookPath": "/opt/hami"},
        "devicePlugin": {"monitor": {"ctrPath": "/opt/hami/vgpu/containers"}},
    }

    assert helm.objects(given)


@pytest.mark.parametrize(
    ("entries", "nodes"),
    [
        ([{"name": "a", "operatingmode": "mig"}, {"name": "b"}, None], "a"),
        ([{"name": n, "operatingmode": "mig"} for n in "ab"], "a, b"),
        ([{"name": "a", "operatingmode": "hami-core"}], ""),
        (None, ""),
        ("no list", ""),
    ],
)
def test_the_notes_name_the_nodes_of_mig_that_give_no_slices(helm: Helm, entries, nodes: str):
    given = {
        **LEAST,
        "devicePlugin": {"nodeConfiguration": {"config": json.dumps({"nodeconfig": entries})}},
    }
    notes = helm.notes(given, "1.31")

    assert bool(nodes) == ("No slices come from" in notes)
    assert f"No slices come from {nodes}: their operatingmode is mig" in notes or not nodes
