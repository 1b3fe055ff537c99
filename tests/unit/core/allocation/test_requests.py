"""Which group belongs to which container: HAMi's vectors, and where we differ.

What a container asks for is what HAMi v2.10's own code made of the same pod.
"""

from typing import Any

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


@pytest.mark.parametrize(("asked", "given"), rows_of(__file__, "requests.txt"))
def test_a_gpu_of_1001_mib_is_given_as_hami_gives_it(asked: str, given: str) -> None:
    words = dict(word.split("=") for word in asked.split() if "=" in word)
    amounts = {name: int(text) for name, text in words.items() if name.startswith((GPU, "a.com"))}
    rules: dict[str, Any] = {
        name: text if "/" in text else int(text)
        for name, text in words.items()
        if name not in {"count", *amounts}
    }
    request = read_request(int(words.get("count", 1)), amounts, RequestRules(**rules))
    assert given == ("none" if request is None else f"{request.memory_on(1001)} {request.cores}")
