"""The pods of the scenario, and the Pod objects that users would write for them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from agent.sandbox.api_errors import Json
from agent.sandbox.lab.cluster import NAMESPACE
from agent.sandbox.scheduler.requests import CORES, COUNT, MEMORY

USE_UUID: Final = "nvidia.com/use-gpuuuid"


@dataclass(frozen=True, slots=True)
class Wish:
    """One container and its request; `gpus` 0: no GPU."""

    name: str
    gpus: int = 0
    memory_mib: int = 0
    core_percent: int = 0
    init: bool = False

    def limits(self) -> dict[str, str]:
        """The resource limits as a user writes them, without values of 0."""
        asked = {COUNT: self.gpus, MEMORY: self.memory_mib, CORES: self.core_percent}
        return {name: str(count) for name, count in asked.items() if count}


@dataclass(frozen=True, slots=True)
class Workload:
    """One pod. `text`: what is special about it. `gpu`: the UUID that it requires."""

    name: str
    text: str
    wishes: tuple[Wish, ...]
    gpu: str = ""

    def pod(self) -> Json:
        """The Pod object."""
        notes = {USE_UUID: self.gpu} if self.gpu else {}
        spec: Json = {"containers": [_container(w) for w in self.wishes if not w.init]}
        if inits := [_container(w) for w in self.wishes if w.init]:
            spec["initContainers"] = inits
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "namespace": NAMESPACE, "annotations": notes},
            "spec": spec,
        }


PLACED: Final = (
    Workload(
        "one", "one GPU with a memory and a core limit", (Wish("main", 1, 4096, core_percent=30),)
    ),
    Workload("pair", "two GPUs in one container", (Wish("main", 2, 2048),)),
    Workload(
        "trio",
        "three containers, one of them without a GPU",
        (Wish("left", 1, 1024), Wish("plain"), Wish("right", 1, 2048, core_percent=20)),
    ),
    Workload(
        "prepared",
        "an init container with a GPU",
        (Wish("load", 1, 1024, init=True), Wish("main", 1, 2048)),
    ),
)


def fitting(gpus: int) -> tuple[Workload, ...]:
    """The pods of `PLACED` that a node with that many GPUs can hold."""
    return tuple(one for one in PLACED if all(wish.gpus <= gpus for wish in one.wishes))


def slices_of(workloads: Iterable[Workload]) -> int:
    """The most slices that they take together."""
    return sum(wish.gpus for one in workloads for wish in one.wishes)


BURST: Final = 4
"""Pods of the burst. Like HAMi's, the scheduler's client makes ten requests and then five a second:
enough for one pod and the first reads of three more, which then wait for the lock."""


def too_big(memory_mib: int) -> Workload:
    """A pod that no GPU of `memory_mib` can take."""
    return Workload("too-big", "more memory than a GPU has", (Wish("main", 1, 2 * memory_mib),))


def pinned(uuid: str) -> Workload:
    """A pod that requires one GPU."""
    return Workload("pinned", "insists on one GPU", (Wish("main", 1, 1024),), gpu=uuid)


def plain(name: str) -> Workload:
    """A pod with one small share of any GPU."""
    return Workload(name, "a small share", (Wish("main", 1, 512),))


def _container(wish: Wish) -> Json:
    limits = wish.limits()
    return {"name": wish.name, "image": "sandbox"} | (
        {"resources": {"limits": limits}} if limits else {}
    )
