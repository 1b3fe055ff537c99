"""The webhook against what HAMi v2.10's own code answered."""

from typing import Any

import pytest

from agent.sandbox.api_errors import ForbiddenError, StatusError
from agent.sandbox.patching import json_patch
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.usage import Quotas, Usage
from agent.sandbox.scheduler.webhook import admit_pod, review_pod
from tests.fakes.scheduler_vectors import Case, build_pod, load_cases

CASES = load_cases("webhook")


def build_settings(case: Case) -> SchedulerSettings:
    config = case["config"] or {}
    return SchedulerSettings(
        overwrite_env=config.get("overwriteEnv", False),
        gpu_core_policy=config.get("gpuCorePolicy", "default"),
        runtime_class_name=config.get("runtimeClassName", ""),
    )


@pytest.mark.parametrize("case_id", sorted(CASES))
def test_a_pod_is_admitted_and_filled_in_as_by_hami(case_id: str) -> None:
    case = CASES[case_id]
    pod = build_pod(case["pod"])
    patches = sorted(case["patches"], key=lambda patch: patch["path"])

    quotas = Quotas(Usage(), 1)
    if "quota" in case:
        metadata = {"namespace": "default", "name": "q"}
        quotas.see("ADDED", {"metadata": metadata, "spec": {"hard": case["quota"]}})

    admission = review_pod(pod, build_settings(case), quotas)

    assert case["allowed"] == admission.is_allowed
    assert json_patch(pod, patches) == admission.pod
    assert case.get("message", "") == admission.message
    assert case.get("code", 200) == admission.code


def test_the_vectors_are_all_there() -> None:
    assert 14 == len(CASES)


def test_a_denied_pod_is_refused_in_the_words_of_the_api_server() -> None:
    pod = build_pod(CASES["WL"]["pod"])

    with pytest.raises(ForbiddenError) as refusal:
        admit_pod(pod, SchedulerSettings())

    denied = 'admission webhook "vgpu.hami.io" denied the request: '
    assert denied + "container side is privileged" == refusal.value.message


def test_an_invalid_percentage_is_an_internal_error_of_the_webhook() -> None:
    with pytest.raises(StatusError) as refusal:
        admit_pod(build_pod(CASES["WE"]["pod"]), SchedulerSettings())

    assert 500 == refusal.value.code


def test_the_given_pod_is_not_changed() -> None:
    pod = build_pod(CASES["WA"]["pod"])

    admit_pod(pod, SchedulerSettings())

    assert build_pod(CASES["WA"]["pod"]) == pod


def test_without_a_default_count_a_memory_limit_asks_for_no_gpu() -> None:
    pod = build_pod({"containers": [{"name": "c", "limits": {"nvidia.com/gpumem": "1000"}}]})

    admitted = admit_pod(pod, SchedulerSettings(default_gpu_count=0))

    assert pod == admitted


MEMORY = {"nvidia.com/gpumem": "1000"}
COUNT = {"nvidia.com/gpu": "1"}


@pytest.mark.parametrize(
    ("requests", "limits", "expected"),
    [
        (COUNT, {}, {"nvidia.com/gpucores": "100"}),
        (COUNT | MEMORY, {}, None),
        (COUNT | {"nvidia.com/gpucores": "10"}, {}, None),
        (COUNT, {"nvidia.com/gpumem-percentage": "50"}, {"nvidia.com/gpu": "1"}),
    ],
)
def test_a_count_in_the_requests_alone_counts_for_the_default_of_the_cores_only(
    requests: dict[str, str], limits: dict[str, str], expected: dict[str, str] | None
) -> None:
    pod = build_pod({"containers": [{"name": "c", "limits": limits}]})
    pod["spec"]["containers"][0]["resources"]["requests"] = requests

    admitted = admit_pod(pod, SchedulerSettings())

    assert ("schedulerName" in admitted["spec"]) == (expected is not None)
    got = admitted["spec"]["containers"][0]["resources"]["limits"]
    assert limits | (expected or {}) == got


def test_a_fraction_of_a_percent_counts_as_the_next_whole_one() -> None:
    limits = COUNT | {"nvidia.com/gpumem-percentage": "99500m"}

    admitted = admit_pod(
        build_pod({"containers": [{"name": "c", "limits": limits}]}), SchedulerSettings()
    )

    assert "100" == admitted["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpucores"]


@pytest.mark.parametrize(
    ("labels", "namespace_labels", "is_changed"),
    [
        ({"hami.io/webhook": "ignore"}, {}, False),
        ({}, {"hami.io/webhook": "ignore", "team": "a"}, False),
        ({"hami.io/webhook": "use"}, {"hami.io/webhook": ""}, True),
        ({"webhook": "ignore"}, {"team": "ignore"}, True),
        (None, None, True),
    ],
)
def test_a_label_of_the_pod_or_of_its_namespace_excludes_it(
    labels: Any, namespace_labels: Any, *, is_changed: bool
) -> None:
    pod = build_pod(CASES["WA"]["pod"])
    pod["metadata"]["labels"] = labels

    admitted = admit_pod(pod, SchedulerSettings(), namespace_labels)

    assert is_changed == (admitted != pod)
