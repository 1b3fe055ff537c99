"""What containers ask for and which group is theirs, as HAMi v2.10's own code says; room on a GPU.

Room: Kubernetes' arithmetic, and never more than is registered.
"""

import re
from typing import Any

import pytest
from msgspec.structs import replace

from agent.allocate.match import pair_groups
from agent.allocate.room import (
    ContainerRequest,
    GpuUse,
    RequestRules,
    RoomClaim,
    claim_of,
    gpu_use,
    pod_use,
    promised,
    read_request,
    scheduled,
    shortage,
)
from agent.cluster import ALLOCATED, VGPU_NODE, ContainerView, Phase, PodTable, PodView, Role
from agent.errors import Refusal, RefusalReason
from agent.hami.annotations import consume, decode_pod_devices
from agent.kube.objects import decode_pod
from agent.ledger import Ledger, Row
from agent.model import Share
from agent.sandbox.store import Json
from tests.builders import (
    G1,
    G2,
    POD_UID,
    RESOURCE,
    a_container,
    a_gpu,
    a_pod,
    a_pod_uid,
    a_row,
    a_share,
    a_shared_gpu,
)
from tests.fakes.scheduler_vectors import build_pod, load_cases
from tests.hami_vectors import Vector, cases
from tests.unit.rows import rows_of

DIFFERENT = {
    "next_container-061": "positions in the text decide nothing",
    "next_container-062": "is served, not consumed, what counts",
    "next_container-063": "a placeholder is no request",
    "next_container-244": "names of sockets",
}


def containers_of(vector: Vector) -> tuple[ContainerView, ...]:
    """The vector's containers; each asks for what the text has at its position."""
    inits, apps = vector.given["initContainers"], vector.given["containers"]
    groups = decode_pod_devices(vector.given["annotation"])
    views = [a_container(name=f"init{n}", role=Role.INIT) for n in range(inits)]
    views += [a_container(name=f"ctr{n}") for n in range(apps)]
    return tuple(
        a_container(name=view.name, role=view.role, count=len(group))
        for view, group in zip(views, groups, strict=False)
    )


@pytest.mark.parametrize("vector", cases("next_container", without=DIFFERENT), ids=str)
def test_the_next_container_is_the_one_that_hami_takes(vector: Vector):
    text = vector.given["annotation"]
    found = pair_groups(decode_pod_devices(text), containers_of(vector))
    (name, (place, shares)), *_ = found.items()
    expected = tuple(
        Share(device["UUID"], device["Usedmem"], device["Usedcores"])
        for device in vector.expected["devices"]
    )
    assert (vector.expected["container"], expected) == (name, shares)
    # HAMi's text grows by one separator with every container; ours keeps its length.
    assert vector.expected["annotationAfter"] == consume(text, {place}) + ";"


def paired(words: str) -> str:
    """The containers that have a group, by the sizes of groups and the requests of containers."""
    sizes, _, asking = words.partition(" | ")
    requests = (word.split(":") for word in asking.split())
    containers = [
        a_container(name=f"c{place}", role=Role(role), count=int(count))
        for place, (role, count) in enumerate(requests)
    ]
    try:
        found = pair_groups([(a_share(),) * int(size) for size in sizes.split()], containers)
    except Refusal as error:
        assert RefusalReason.COUNT_MISMATCH is error.gate  # noqa: PT017 -- either outcome is one
        return f"! {error}"
    return " ".join(found) or "none"


@pytest.mark.parametrize(("words", "expected"), rows_of(__file__, "groups.txt"))
def test_groups_belong_to_containers_or_their_numbers_are_told(words: str, expected: str):
    found = paired(words)
    assert expected == found or (expected[0] == "!" and expected[2:] in found)


CASES = load_cases("filter")


def as_hami(request: ContainerRequest | None) -> Json | None:
    if request is None:
        return None
    return {
        "coresreq": request.core_percent,
        "mempercentage": request.memory_percent,
        "memreq": request.memory_mib,
        "nums": request.count,
    }


@pytest.mark.parametrize("case_id", sorted(CASES))
def test_a_pod_of_the_api_server_is_read_as_hami_reads_it(case_id: str) -> None:
    case = CASES[case_id]
    config = case.get("config") or {}
    rules = RequestRules(
        memory_factor=config.get("memoryFactor", 1),
        default_memory_mib=config.get("defaultMemory", 0),
        default_core_percent=config.get("defaultCores", 0),
    )
    pod = build_pod(case["pod"])
    pod["metadata"].setdefault("uid", "u")

    asked = decode_pod(pod, RESOURCE).containers
    found = [read_request(one.count, dict(one.others), rules) for one in asked]
    assert case["expect"]["requests"] == [*map(as_hami, found)]


@pytest.mark.parametrize(("asked", "given"), rows_of(__file__, "requests.txt"))
def test_a_gpu_of_1001_mib_is_given_as_hami_gives_it(asked: str, given: str) -> None:
    words = dict(word.split("=") for word in asked.split() if "=" in word)
    amounts = {
        name: int(text) for name, text in words.items() if name.startswith((RESOURCE, "a.com"))
    }
    rules: dict[str, Any] = {
        name: text if "/" in text else int(text)
        for name, text in words.items()
        if name not in {"count", *amounts}
    }
    request = read_request(int(words.get("count", 1)), amounts, RequestRules(**rules))
    assert given == ("none" if request is None else f"{request.memory_on(1001)} {request.cores}")


# Room on a GPU.

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
    raised = replace(row, live_limits=(Share(G1, 700, 40),))
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
