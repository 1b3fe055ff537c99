"""Room as HAMi's scheduler counts it: what it accepts is never refused for room, from one view."""

from typing import Any

import pytest

from agent.allocate.room import RoomClaim, claim_of, gpu_use, scheduled
from agent.cluster import ALLOCATED, VGPU_NODE, PodView
from agent.kube.objects import decode_pod
from agent.ledger import Row
from agent.model import Share
from tests.builders import G1, G2, RESOURCE, a_gpu, a_pod_uid, a_row, a_shared_gpu

NODE = "n1"
MIB = 16384
SHARED = {uuid: a_shared_gpu(gpu=a_gpu(uuid=uuid), registered_mib=MIB) for uuid in (G1, G2)}
AT = "2026-09-01T12:00:07Z"

WAITING: dict[str, Any] = {"waiting": {"reason": "PodInitializing"}}
RUNNING: dict[str, Any] = {"running": {"startedAt": AT}}


def ended(exit_code: int) -> dict[str, Any]:
    return {"terminated": {"exitCode": exit_code, "finishedAt": AT}}


Told = tuple[bool, Share | None, dict[str, Any], dict[str, Any]]
"""One init container: whether it is a sidecar, its share, None: it asks for no GPU, its state and
its last one."""


def text_of(share: Share) -> str:
    return f"{share.uuid},NVIDIA,{share.memory_mib},{share.core_percent}:;"


def asked(share: Share | None) -> dict[str, Any]:
    return {"resources": {"limits": {RESOURCE: "1"} if share else {}}}


def pod_of(number: int, inits: list[Told], apps: list[tuple[Share | None, dict[str, Any]]]) -> Any:
    """What the API server shows of a pod whose containers have one slice or none.

    The scheduler writes no group for one that has none.
    """
    uid = a_pod_uid(number)
    shares = [share for _, share, _, _ in inits] + [share for share, _ in apps]
    groups = "".join(map(text_of, filter(None, shares)))
    return {
        "metadata": {
            "uid": uid,
            "name": f"p{number}",
            "namespace": "default",
            "creationTimestamp": AT,
            "annotations": {VGPU_NODE: NODE, ALLOCATED: groups},
        },
        "spec": {
            "nodeName": NODE,
            "initContainers": [
                {"name": f"init{place}", **asked(share)}
                | ({"restartPolicy": "Always"} if side else {})
                for place, (side, share, *_) in enumerate(inits)
            ],
            "containers": [
                {"name": f"app{place}", **asked(share)} for place, (share, _) in enumerate(apps)
            ],
        },
        "status": {
            "phase": "Running",
            "initContainerStatuses": [
                {"name": f"init{place}", "state": state, "lastState": last}
                for place, (_, _, state, last) in enumerate(inits)
            ],
            "containerStatuses": [
                {"name": f"app{place}", "state": state}
                for place, (_, state) in enumerate(apps)
                if state
            ],
        },
    }


def view_of(pod: Any) -> PodView:
    return decode_pod(pod, RESOURCE)


def rows_of(pod: Any) -> list[Row]:
    """The rows of a pod of which every container was answered."""
    view = view_of(pod)
    groups = enumerate(filter(None, view.groups or ()))
    return [
        a_row(pod_uid=view.uid, container=one.name, role=one.role, group=number, shares=group)
        for one, (number, group) in zip(view.gpu_containers, groups, strict=True)
    ]


def scheduled_of(pod: Any) -> list[RoomClaim]:
    """What the scheduler counts of it."""
    view = view_of(pod)
    return [claim for row in rows_of(pod) if (claim := scheduled(row, view)) is not None]


def claims_of(pod: Any) -> list[RoomClaim]:
    """What it takes."""
    view = view_of(pod)
    return [claim_of(row) for row in rows_of(pod) if row.counts(view)]


BIG, SMALL = Share(G1, 12000, 50), Share(G1, 4000, 10)


@pytest.mark.parametrize(
    ("inits", "true", "counted"),
    [
        pytest.param([(False, BIG, RUNNING, {})], 12000, 12000, id="it runs"),
        pytest.param([(False, BIG, ended(1), {})], 12000, 12000, id="it failed"),
        pytest.param([(False, BIG, ended(0), {})], 4000, 4000, id="it succeeded"),
        pytest.param([(False, BIG, RUNNING, ended(0))], 4000, 4000, id="it runs again"),
        pytest.param([(False, BIG, WAITING, ended(1))], 12000, 12000, id="it is tried again"),
        pytest.param(
            [(False, BIG, ended(0), {}), (False, SMALL, RUNNING, {})],
            12000,
            12000,
            id="another one runs",
        ),
        pytest.param(
            [(False, BIG, ended(0), {}), (True, SMALL, RUNNING, {})],
            8000,
            12000,
            id="a sidecar runs",
        ),
        pytest.param(
            [(False, BIG, ended(0), {}), (True, SMALL, RUNNING, ended(0))],
            8000,
            4000,
            id="a sidecar had ended well",
        ),
        pytest.param(
            [(True, SMALL, RUNNING, {}), (False, BIG, RUNNING, {})],
            16000,
            12000,
            id="it runs beside a sidecar that was started before it",
        ),
        pytest.param(
            [(False, BIG, RUNNING, {}), (True, SMALL, WAITING, {})],
            12000,
            12000,
            id="it runs, and a sidecar comes after it",
        ),
    ],
)
def test_an_init_peak_counts_until_all_init_containers_have_succeeded(inits, true, counted):
    """For HAMi 2.10 a sidecar is an init container like any other."""
    pod = pod_of(1, inits, [(SMALL, WAITING)])

    assert true == gpu_use(claims_of(pod), SHARED[G1]).memory_mib
    assert counted == gpu_use(scheduled_of(pod), SHARED[G1]).memory_mib


def test_behind_an_init_container_without_gpus_an_app_container_counts_as_nothing():
    pod = pod_of(1, [(False, None, ended(0), {})], [(BIG, RUNNING)])

    assert 12000 == gpu_use(claims_of(pod), SHARED[G1]).memory_mib
    assert [] == scheduled_of(pod)


def test_an_app_container_that_was_made_tells_that_the_init_containers_have_succeeded():
    pod = pod_of(1, [(False, BIG, WAITING, {})], [(SMALL, WAITING)])
    pod["status"]["containerStatuses"][0]["lastState"] = ended(137)

    assert 4000 == gpu_use(claims_of(pod), SHARED[G1]).memory_mib
    # One that cannot be seen counts with its init containers.
    assert [(True, False), (True, True)] == [
        (row.counts(None), row.counts(view_of(pod))) for row in rows_of(pod)
    ]
