"""The scenario's own judgement: a container that has something else than was written is found."""

import pytest

from agent.model import GpuUuid
from agent.sandbox.lab.places import Places, open_places
from agent.sandbox.scenario.facts import PodFacts, differences, parsed, promised
from agent.sandbox.scenario.workloads import Wish, Workload
from agent.wire.v1beta1 import ContainerAllocateResponse, Mount
from tests.builders import a_gpu

UID = "0d7c1d3f-6e0f-4f4e-9d6c-4d1b5a0d6a11"
FIRST, SECOND = GpuUuid("GPU-a"), GpuUuid("GPU-b")
GPUS = {
    SECOND: a_gpu(uuid=SECOND, index=0, pci="0000:0a:00.0"),
    FIRST: a_gpu(uuid=FIRST, index=1, pci="0000:1b:00.0"),
}
TEXT = "GPU-a,NVIDIA,1000,30:GPU-b,NVIDIA,2000,30:;"
"""One container with two GPUs, not in the order of their bus ids."""


@pytest.fixture
def places():
    with open_places() as made:
        leaf = made.hook / "vgpu/containers" / f"{UID}_main"
        leaf.mkdir(parents=True)
        leaf.chmod(0o777)
        yield made


def a_placed_pod(text: str = TEXT, *wishes: Wish) -> PodFacts:
    pod = Workload("pair", "", wishes or (Wish("main", 2, 1000),)).pod()
    pod["metadata"] |= {"uid": UID, "annotations": {"hami.io/vgpu-devices-allocated": text}}
    return PodFacts(pod | {"status": {"phase": "Running"}})


def an_answer(places: Places, **envs: str | None) -> ContainerAllocateResponse:
    home = places.hook / "vgpu"
    right = {
        "NVIDIA_VISIBLE_DEVICES": "GPU-b,GPU-a",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "2000m",
        "CUDA_DEVICE_MEMORY_LIMIT_1": "1000m",
        "CUDA_DEVICE_SM_LIMIT": "30",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": f"{home}/x.cache",
    }
    return ContainerAllocateResponse(
        envs={name: value for name, value in (right | envs).items() if value is not None},
        mounts=[
            Mount(f"{home}/libvgpu.so", f"{home}/libvgpu.so", read_only=True),
            Mount(str(home), f"{home}/containers/{UID}_main"),
            Mount("/tmp/vgpulock", f"{home}/containers/{UID}_main"),  # noqa: S108 -- HAMi-core's
            Mount("/etc/ld.so.preload", f"{home}/ld.so.preload", read_only=True),
        ],
    )


def found(places: Places, answer: ContainerAllocateResponse, pod: PodFacts | None = None):
    return differences(pod or a_placed_pod(), {(UID, "main"): bytes(answer)}, GPUS, places)


def test_what_was_written_is_right(places):
    assert [] == found(places, an_answer(places))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NVIDIA_VISIBLE_DEVICES", "GPU-a,GPU-b"),
        ("NVIDIA_VISIBLE_DEVICES", "GPU-b"),
        ("CUDA_DEVICE_MEMORY_LIMIT_0", "1000m"),
        ("CUDA_DEVICE_MEMORY_LIMIT_1", None),
        ("CUDA_DEVICE_MEMORY_LIMIT_2", "1m"),
        ("CUDA_DEVICE_SM_LIMIT", "31"),
        ("CUDA_DEVICE_SM_LIMIT", None),
        ("CUDA_DEVICE_MEMORY_SHARED_CACHE", None),
        ("CUDA_DEVICE_MEMORY_SHARED_CACHE", "/somewhere/else.cache"),
    ],
)
def test_another_value_is_found(places, name, value):
    problems = found(places, an_answer(places, **{name: value}))

    assert problems
    assert all(text.startswith("pair/main: ") for text in problems)


@pytest.mark.parametrize("index", range(4))
def test_a_mount_that_is_missing_or_elsewhere_is_found(places, index):
    less, other = an_answer(places), an_answer(places)
    missing = less.mounts.pop(index)
    other.mounts[index].host_path = "/elsewhere"

    assert [True] == [missing.container_path in text for text in found(places, less)]
    assert [True] == ["/elsewhere" in text for text in found(places, other)]


def test_a_mount_too_many_is_found(places):
    answer = an_answer(places)
    answer.mounts.append(Mount("/root", "/root"))

    assert ["/root" in text for text in found(places, answer)] == [True]


def test_a_directory_that_not_everybody_may_write_is_found(places):
    (places.hook / "vgpu/containers" / f"{UID}_main").chmod(0o755)

    assert [True] == ["mode 755" in text for text in found(places, an_answer(places))]


def test_a_directory_that_is_not_there_is_found(places):
    (places.hook / "vgpu/containers" / f"{UID}_main").rmdir()

    assert [True] == ["is not there" in text for text in found(places, an_answer(places))]


def test_no_answer_for_a_container_that_asked_is_found(places):
    assert ["pair/main got no answer"] == differences(a_placed_pod(), {}, GPUS, places)


def test_an_answer_for_a_container_without_a_gpu_is_found(places):
    pod = a_placed_pod("", Wish("main"))

    assert ["pair/main has no GPU and got an answer"] == found(places, an_answer(places), pod)


def test_fewer_shares_than_were_asked_for_are_found(places):
    pod = a_placed_pod("GPU-a,NVIDIA,1000,30:;")

    assert ["pair/main requested 2 GPUs"] == found(places, an_answer(places), pod)


def test_groups_belong_to_the_containers_that_ask_init_containers_first():
    wishes = (Wish("plain"), Wish("app", 1, 2), Wish("load", 1, 1, init=True))
    shares = a_placed_pod("GPU-a,NVIDIA,1,0:;GPU-b,NVIDIA,2,0:;", *wishes).shares()

    assert ["load", "plain", "app"] == list(shares)
    assert [FIRST, None, SECOND] == [given[0].uuid if given else None for given in shares.values()]


def test_an_answer_promises_what_its_environment_says(places):
    answer = parsed(bytes(an_answer(places)))

    assert {SECOND: (2000, 30), FIRST: (1000, 30)} == promised(answer)
