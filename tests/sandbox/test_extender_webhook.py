"""What a real API server is answered about new pods."""

from pathlib import Path
from typing import Any

import pytest

from agent.sandbox.api_errors import Json
from agent.sandbox.extender.service import ExtenderOptions
from agent.sandbox.patching import json_patch
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.webhook import admit_pod
from tests.fakes.extender_rig import decode_patch, extended

pytestmark = pytest.mark.looptime(False)


def new_pod(limits: Json, **container: Any) -> Json:
    """A pod as an API server posts it: nothing has a name or UID of the server's yet."""
    resources = {"limits": limits}
    spec = {"containers": [{"name": "c", "resources": resources, **container}]}
    return {"metadata": {"generateName": "p-", "creationTimestamp": None}, "spec": spec}


@pytest.mark.parametrize("version", ["admission.k8s.io/v1", "admission.k8s.io/v1beta1"])
async def test_a_pod_that_asks_for_a_gpu_is_patched(tmp_path: Path, version: str) -> None:
    pod = new_pod({"nvidia.com/gpu": "1"})
    async with extended(tmp_path) as rig:
        response = await rig.review(pod, version)

    assert ("705ab4f5", True) == (response["uid"], response["allowed"])
    changes = decode_patch(response)
    assert admit_pod(pod, SchedulerSettings()) == json_patch(pod, changes)
    assert {"op": "add", "path": "/spec/schedulerName", "value": "hami-scheduler"} in changes


async def test_the_name_of_the_scheduler_is_a_setting(tmp_path: Path) -> None:
    options = ExtenderOptions(SchedulerSettings(scheduler_name="ours"))
    async with extended(tmp_path, options) as rig:
        changes = decode_patch(await rig.review(new_pod({"nvidia.com/gpu": "1"})))

    assert {"op": "add", "path": "/spec/schedulerName", "value": "ours"} in changes


async def test_a_pod_without_a_gpu_stays_as_it_is(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        response = await rig.review(new_pod({"cpu": "1"}))

    assert {"uid": "705ab4f5", "allowed": True} == response


async def test_a_pod_of_another_scheduler_stays_as_it_is(tmp_path: Path) -> None:
    pod = new_pod({"nvidia.com/gpu": "1"})
    pod["spec"]["schedulerName"] = "volcano"
    async with extended(tmp_path) as rig:
        response = await rig.review(pod)

    assert "patch" not in response
    assert response["allowed"]
    assert "pod already has different scheduler assigned" == response["status"]["message"]


async def test_a_privileged_pod_is_denied_with_the_reason(tmp_path: Path) -> None:
    pod = new_pod({"nvidia.com/gpu": "1"}, securityContext={"privileged": True})
    async with extended(tmp_path) as rig:
        response = await rig.review(pod)

    assert {
        "uid": "705ab4f5",
        "allowed": False,
        "status": {"code": 403, "message": "container c is privileged"},
    } == response


@pytest.mark.parametrize("pod", [None, {}, {"metadata": {}, "spec": {"containers": [1]}}])
async def test_an_object_that_is_no_pod_is_denied(tmp_path: Path, pod: Any) -> None:
    async with extended(tmp_path) as rig:
        response = await rig.review(pod)

    assert (False, 400) == (response["allowed"], response["status"]["code"])
    assert response["status"]["message"].startswith("the body has another shape: ")
