"""Room on a GPU: Kubernetes' arithmetic, and never more than is registered."""

import re
from typing import Any

import msgspec
import pytest

from agent.allocate.room import (
    GpuUse,
    RoomClaim,
    claim_of,
    gpu_use,
    pod_use,
    promised,
    scheduled,
    shortage,
)
from agent.cluster import ALLOCATED, VGPU_NODE, Phase, PodTable, PodView, Role
from agent.kube.objects import decode_pod
from agent.ledger import Ledger, Row
from agent.model import Share
from tests.builders import (
    G1,
    G2,
    POD_UID,
    RESOURCE,
    a_gpu,
    a_pod,
    a_pod_uid,
    a_row,
    a_share,
    a_shared_gpu,
)
from tests.unit.rows import rows_of

GPU = a_shared_gpu(gpu=a_gpu(uuid=G1), registered_mib=1000, core_percent=100)
OTHER = a_shared_gpu(gpu=a_gpu(uuid=G2), registered_mib=1000, core_percent=100)
GPUS = {G1: GPU, G2: OTHER}


def claim(pod: int = 1, role: Role = Role.APP, mib: int = 100, percent: int = 10) -> RoomClaim:
    share = a_share(uuid=G1, memory_mib=mib, core_percent=percent)
    return RoomClaim(a_pod_uid(pod), role, (share,))


def test_init_containers_count_by_their_peak_and_no_memory_means_all_of_it():
    inits = [claim(role=Role.INIT, mib=500, percent=1), claim(role=Role.INIT, mib=1, percent=50)]
    assert GpuUse(500, 50) == pod_use([*inits, claim(mib=100)], GPU)
    assert GpuUse(1000, 10) == pod_use([claim(mib=0)], GPU)


def summed(text: str) -> str:
    """What containers in that order need: `s` a sidecar, `i` an init container, `a` an app."""
    roles = {"s": Role.SIDECAR, "i": Role.INIT, "a": Role.APP}
    claims = [
        RoomClaim(
            a_pod_uid(1), roles[word[0]], (Share(G1, int(word[1:]), 0),) * (word[1:] != "0"), place
        )
        for place, word in enumerate(text.split())
    ]
    assert pod_use(claims, GPU) == pod_use(claims[::-1], GPU)
    return str(pod_use(claims, GPU).memory_mib)


def test_limits_that_an_earlier_version_set_count_until_the_row_goes():
    row = a_row(shares=[a_share(uuid=G1, memory_mib=100)])
    raised = msgspec.structs.replace(row, live_limits=(Share(G1, 700, 40),))
    table = PodTable(pods={row.key.pod_uid: a_pod(phase=Phase.RUNNING)}, synced=True)
    assert GpuUse(700, 40) == promised(Ledger((raised,)), table, GPU)
    assert GpuUse(700, 40) == gpu_use(filter(None, [scheduled(raised, None)]), GPU)


def test_what_just_fits_fits_and_one_more_does_not():
    live = [claim(1, mib=400, percent=50), claim(2, mib=500, percent=30)]
    assert None is shortage(claim(3, mib=100, percent=20), live, GPUS)
    memory = shortage(claim(3, mib=101, percent=20), live, GPUS)
    cores = shortage(claim(3, mib=100, percent=21), live, GPUS)
    assert memory is not None
    assert cores is not None
    assert (True, 1001) == (memory.memory, memory.total.memory_mib)
    assert (False, 101) == (cores.memory, cores.total.core_percent)


# Room as HAMi's scheduler counts it: what it accepts is never refused for room, from one view.

BIG, SMALL = Share(G1, 12000, 50), Share(G1, 4000, 10)
SHARES = {"big": BIG, "small": SMALL, "none": None}
AT = "2026-09-01T12:00:07Z"
STATES: dict[str, Any] = {
    "runs": {"running": {"startedAt": AT}},
    "waits": {"waiting": {"reason": "PodInitializing"}},
    "done": {"terminated": {"exitCode": 0, "finishedAt": AT}},
    "failed": {"terminated": {"exitCode": 1, "finishedAt": AT}},
}
NODE = "n1"
WHOLE = a_shared_gpu(gpu=a_gpu(uuid=G1), registered_mib=16384)


def pod_of(inits: str, apps: str) -> PodView:
    """What the API server shows of a pod with these containers, each with its share and state.

    `+` is a sidecar; behind a slash is the state before. The scheduler writes no group for one that
    asks for no GPU.
    """
    spec: dict[str, list[Any]] = {"initContainers": [], "containers": []}
    status: dict[str, list[Any]] = {"initContainerStatuses": [], "containerStatuses": []}
    groups = ""
    for part, words, told in zip(spec, (inits, apps), status, strict=True):
        for place, word in enumerate(words.split()):
            size, state, last = (*re.split("[:/]", word.strip("+")), "")[:3]
            share = SHARES[size]
            groups += (
                f"{share.uuid},NVIDIA,{share.memory_mib},{share.core_percent}:;" if share else ""
            )
            one = {
                "name": f"{part}{place}",
                "resources": {"limits": {RESOURCE: "1"} if share else {}},
            }
            spec[part].append(one | ({"restartPolicy": "Always"} if "+" in word else {}))
            states = {"state": STATES[state], "lastState": STATES.get(last, {})}
            status[told].append({"name": one["name"], **states})
    metadata = {"uid": POD_UID, "name": "p", "creationTimestamp": AT}
    notes = {"annotations": {VGPU_NODE: NODE, ALLOCATED: groups}}
    pod = {"metadata": metadata | notes, "spec": {"nodeName": NODE, **spec}}
    return decode_pod(pod | {"status": {"phase": "Running", **status}}, RESOURCE)


def rows_of_pod(view: PodView) -> list[Row]:
    """The rows of a pod of which every container was answered."""
    groups = enumerate(filter(None, view.groups or ()))
    return [
        a_row(pod_uid=view.uid, container=one.name, role=one.role, group=number, shares=group)
        for one, (number, group) in zip(view.gpu_containers, groups, strict=True)
    ]


@pytest.mark.parametrize(("pod", "expected"), rows_of(__file__, "room.txt"))
def test_a_pod_takes_the_room_that_the_table_says(pod, expected):
    inits, bar, apps = pod.partition("|")
    if not bar:
        assert expected == summed(pod)
        return
    view = pod_of(inits, apps)
    rows = rows_of_pod(view)
    found = [claim_of(row) for row in rows if row.counts(view)]
    by_hami = filter(None, (scheduled(row, view) for row in rows))

    assert expected == f"{gpu_use(found, WHOLE).memory_mib} {gpu_use(by_hami, WHOLE).memory_mib}"
    assert all(row.counts(None) for row in rows)  # of a pod that cannot be seen
