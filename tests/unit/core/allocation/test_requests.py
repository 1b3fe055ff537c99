"""What a container asks for is what HAMi v2.10's own code made of the same pod."""

import pytest

from agent.allocate.room import ContainerRequest, RequestRules, read_request
from agent.kube.objects import decode_pod
from agent.sandbox.store import Json
from tests.fakes.scheduler_vectors import build_pod, load_cases

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
