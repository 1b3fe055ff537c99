"""The Job after `helm uninstall`: its names fit, it runs where agents ran, and it ends in time."""

from collections.abc import Iterator, Sequence

import pytest

from agent.cli.node import WAIT
from tests.chart.lab.helm import Object, of_kind, the
from tests.chart.lab.values import LEAST, values

LABELS = {"labels", "matchLabels", "selector", "nodeSelector"}


def labels_in(value: object) -> Iterator[tuple[str, object]]:
    """All labels of an object, and all that are looked for."""
    if isinstance(value, list):
        for one in value:
            yield from labels_in(one)
    if isinstance(value, dict):
        for key, one in value.items():
            if key in LABELS and isinstance(one, dict) and LABELS.isdisjoint(one):
                yield from one.items()
            else:
                yield from labels_in(one)


def job_and_agent(objects: Sequence[Object]) -> tuple[Object, Object]:
    """The labels of their pods."""
    job, agents = (the(objects, kind)["spec"] for kind in ("Job", "DaemonSet"))
    return job["template"]["metadata"]["labels"], agents["selector"]["matchLabels"]


@pytest.mark.parametrize("length", [53, 54, 63])
def test_a_long_name_fits_every_label_and_stays_one_of_its_own(helm, length):
    first, second = (
        helm.objects({**LEAST, "nameOverride": "a" * (length - 1) + end}) for end in "bc"
    )
    labels = list(labels_in(list(first)))
    (job, agent), (other, _) = job_and_agent(first), job_and_agent(second)
    key = "app.kubernetes.io/name"

    assert [] == [one for one in labels if len(str(one[1])) > 63]
    assert "a" * (length - 1) + "b" == agent[key]
    assert job[key].startswith("a" * 44)
    assert job[key].endswith("-uninstall")
    assert 3 == len({job[key], other[key], agent[key]})
    selector = of_kind(first, "NetworkPolicy")[the(first, "Job")["metadata"]["name"]]
    assert selector["spec"]["podSelector"]["matchLabels"].items() <= job.items()


@pytest.mark.parametrize("name", ["1234", "1.5", "on", "0x1f"])
def test_a_name_that_yaml_takes_for_something_else_stays_a_text(helm, name):
    objects = helm.objects({**LEAST, "nameOverride": name})
    (argument,) = [
        one
        for one in the(objects, "Job")["spec"]["template"]["spec"]["containers"][0]["args"]
        if one.startswith("--selector=")
    ]
    _, agent = job_and_agent(objects)

    assert [] == [one for one in labels_in(list(objects)) if not isinstance(one[1], str)]
    assert name == agent["app.kubernetes.io/name"]
    assert argument == "--selector=" + ",".join(f"{key}={value}" for key, value in agent.items())


def test_the_attempts_of_the_job_end_by_themselves_and_before_helm(helm):
    job = the(helm.objects(values("least")), "Job")["spec"]
    # What is ended from outside leaves no log. Ten seconds are between two attempts.
    attempts = (job["backoffLimit"] + 1) * (WAIT + 10)

    assert attempts + 20 <= job["activeDeadlineSeconds"] < 300


def test_what_gives_the_job_rights_goes_with_its_failure_and_the_job_itself_stays(helm):
    notes = [
        (one["kind"], one["metadata"].get("annotations", {}))
        for one in helm.objects(values("least"))
    ]
    policy = "helm.sh/hook-delete-policy"
    kept = {kind for kind, one in notes if policy in one and "hook-failed" not in one[policy]}

    assert {"Job"} == kept
    assert {"ClusterRole", "ClusterRoleBinding", "ServiceAccount", "Job"} <= {
        kind for kind, one in notes if policy in one
    }
