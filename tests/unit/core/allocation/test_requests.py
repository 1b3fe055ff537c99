"""Which group belongs to which container: HAMi's vectors, and where we differ.

What a container asks for is what HAMi v2.10's own code made of the same pod.
"""

import pytest

from agent.allocate.match import pair_groups
from agent.allocate.room import ContainerRequest, RequestRules, read_request
from agent.cluster import ContainerView, Role
from agent.errors import Refusal, RefusalReason
from agent.hami.annotations import consume, decode_pod_devices
from agent.kube.objects import decode_pod
from agent.model import Share
from agent.sandbox.store import Json
from tests.builders import a_container, a_share
from tests.fakes.scheduler_vectors import build_pod, load_cases
from tests.hami_vectors import Vector, cases

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


def test_a_scheduler_that_writes_no_groups_for_init_containers_means_the_others():
    containers = (
        a_container(name="fetch", role=Role.INIT),
        a_container(name="proxy", role=Role.SIDECAR),
        a_container(name="main"),
    )
    assert ["main"] == list(pair_groups([(a_share(),)], containers))


@pytest.mark.parametrize(
    ("groups", "containers", "words"),
    [
        ([(a_share(),)], [a_container(), a_container(name="b")], "for 1 containers, but 2"),
        ([(a_share(),), (a_share(),)], [a_container()], "for 2 containers, but 1"),
        ([(a_share(),)], [a_container(count=0)], "for 1 containers, but 0"),
        ([()], [a_container(role=Role.INIT)], "for 0 containers, but 1"),
        ([(a_share(),)], [a_container(count=2)], "main requests 2 GPUs, but the scheduler wrote 1"),
        ([(a_share(),) * 3], [a_container(count=2)], "requests 2 GPUs, but the scheduler wrote 3"),
    ],
)
def test_counts_that_do_not_agree_are_refused_with_both_numbers(groups, containers, words: str):
    with pytest.raises(Refusal, match=words) as caught:
        pair_groups(groups, containers)
    assert RefusalReason.COUNT_MISMATCH is caught.value.gate


def test_a_pod_that_asks_for_nothing_and_was_given_nothing_has_no_assignment():
    assert {} == pair_groups([(), ()], [a_container(count=0)])


GPU = "nvidia.com/gpu"
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

    found = [
        read_request(one.count, dict(one.others), rules) for one in decode_pod(pod, GPU).containers
    ]

    assert case["expect"]["requests"] == [*map(as_hami, found)]


MEM, PERCENT, CORES = f"{GPU}mem", f"{GPU}mem-percentage", f"{GPU}cores"


@pytest.mark.parametrize(
    ("amounts", "rules", "mib", "cores"),
    [
        ({}, RequestRules(), 1001, 0),
        ({}, RequestRules(default_memory_mib=300, default_core_percent=20), 300, 20),
        ({MEM: 0, PERCENT: 0}, RequestRules(default_memory_mib=300), 300, 0),
        ({MEM: 7}, RequestRules(default_memory_mib=300, memory_factor=100), 700, 0),
        ({MEM: 7}, RequestRules(memory_factor=-3), 7, 0),
        ({PERCENT: 50}, RequestRules(default_memory_mib=300, memory_factor=100), 500, 0),
        ({PERCENT: 150}, RequestRules(), 1001, 0),
        ({PERCENT: -1}, RequestRules(), 1001, 0),
        ({MEM: 7, PERCENT: 50}, RequestRules(), 7, 0),
        ({CORES: 0}, RequestRules(default_core_percent=20), 1001, 0),
        ({CORES: 150}, RequestRules(), 1001, 100),
        ({CORES: 2**31}, RequestRules(default_core_percent=20), 1001, 20),
        ({"a.com/mem": 7}, RequestRules(memory="a.com/mem"), 7, 0),
        ({MEM: 7}, RequestRules(memory="a.com/mem"), 1001, 0),
    ],
)
def test_a_gpu_of_1001_mib_is_given_as_hami_gives_it(amounts, rules, mib, cores) -> None:
    request = read_request(1, amounts, rules)

    assert request is not None
    assert (mib, cores) == (request.memory_on(1001), request.cores)


@pytest.mark.parametrize(
    ("count", "memory", "factor"), [(0, 1, 1), (1, -1, 1), (1, 2**31, 1), (1, 2**21, 1024)]
)
def test_a_request_that_hami_cannot_count_is_none(count, memory, factor) -> None:
    rules = RequestRules(memory_factor=factor)

    assert read_request(count, {MEM: memory}, rules) is None
    assert read_request(1, {MEM: (2**31 - 1) // factor}, rules) is not None
