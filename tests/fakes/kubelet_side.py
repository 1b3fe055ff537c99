"""What an allocation asks and touches on its node, in memory: the kubelet's books, the runtime."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from agent.cluster import PodUid, PodView
from agent.errors import KubeletError, StateError, WitnessThrottled, WitnessUnsupported
from agent.hookdirs import Cleared, HostHookDirs
from agent.ledger import ContainerKey, Holding, HookFacts
from agent.model import SliceId

RESOURCE = "nvidia.com/gpu"


class FakeWitness:
    """The kubelet's books. It can be over its rate limit, silent, broken, or too old for Get."""

    def __init__(self) -> None:
        self.pods: dict[tuple[str, str], Holding] = {}
        self.asked: list[tuple[str, str]] = []
        self.lists = 0
        self.throttled = 0
        self.failures: list[KubeletError] = []
        self.hung = False
        self.supported = True
        self.delay = 0.0

    def admit(self, pod: PodView, **ids: str) -> None:
        """The kubelet knows the pod; `container=id` for each container that holds ids."""
        self.pods[pod.key] = Holding(
            pod.namespace,
            pod.name,
            {
                one.name: {RESOURCE: frozenset(map(SliceId, ids[one.name].split()))}
                if one.name in ids
                else {}
                for one in pod.containers
            },
        )

    def forget(self, pod: PodView) -> None:
        """The pod was rejected, or has ended."""
        self.pods.pop(pod.key, None)

    async def get(self, namespace: str, pod: str) -> Holding | None:
        self.asked.append((namespace, pod))
        if not self.supported:
            raise WitnessUnsupported("this kubelet has no PodResources Get")
        await self._answer()
        return self.pods.get((namespace, pod))

    async def list(self) -> tuple[Holding, ...]:
        self.lists += 1
        await self._answer()
        return tuple(self.pods.values())

    async def _answer(self) -> None:
        if self.hung:
            await asyncio.Event().wait()
        await asyncio.sleep(self.delay)
        if self.throttled:
            self.throttled -= 1
            raise WitnessThrottled("rejected by rate limit")
        if self.failures:
            raise self.failures.pop(0)


class FakeRecords:
    """The kubelet's checkpoint file; None: it is absent or unreadable."""

    def __init__(self) -> None:
        self.keys: frozenset[ContainerKey] | None = frozenset()
        self.reads = 0
        self.delay = 0.0

    async def read(self, resource: str) -> dict[ContainerKey, frozenset[SliceId]] | None:
        self.reads += 1
        await asyncio.sleep(self.delay)
        return None if self.keys is None else dict.fromkeys(self.keys, frozenset[SliceId]())


class FakeContainers:
    """Which runtime ids have a live cgroup; `alive` None: not known."""

    def __init__(self) -> None:
        self.alive: set[str] | None = set()
        self.pods: frozenset[PodUid] | None = None
        """Pods that have a cgroup; None: not known."""

    async def begun(self) -> frozenset[PodUid] | None:
        return self.pods

    async def running(self, ids: frozenset[str]) -> frozenset[str] | None:
        return None if self.alive is None else ids & self.alive


class FakeSpecifications:
    """The device names that CDI specifications define; None: not known.

    `hanging`: no answer; `slow`: seconds until there is one.
    """

    def __init__(self) -> None:
        self.defined: frozenset[str] | None = frozenset()
        self.hanging = False
        self.slow = 0.0
        self.asked: list[tuple[str, ...]] = []
        self.was_asked = asyncio.Event()

    async def names(self, directories: Sequence[str]) -> frozenset[str] | None:
        self.asked.append(tuple(directories))
        self.was_asked.set()
        if self.hanging:
            await asyncio.Event().wait()
        await asyncio.sleep(self.slow)
        return self.defined


class FakeHookDirs(HostHookDirs):
    """Directories by name; `wiped` and `made` count. None is made while `gate` is closed.

    `hanging` names a call.
    `cleared` is what clear() says, one after the other, `clears` how often it was asked.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.made: Counter[str] = Counter()
        self.wiped: Counter[str] = Counter()
        self.failure: StateError | None = None
        self.missing: tuple[str, ...] = ()
        self.loadable = True
        self.preload: str | None = None
        self.hanging = ""
        self.clears = 0
        self.cleared = [Cleared()]
        self.set_aside = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def mounted(self) -> tuple[Path, ...]:
        return (Path("/usr/local/vgpu/libvgpu.so"), Path("/usr/local/vgpu/ld.so.preload"))

    async def facts(self) -> HookFacts:
        await self._hang("facts")
        library = "/usr/local/vgpu/libvgpu.so"
        return HookFacts(library, self.missing, loadable=self.loadable, preload=self.preload)

    async def check(self) -> None:
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        await self.facts()

    async def prepare(self, name: str, *, wipe: bool) -> None:
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.names.add(name)
        self.made[name] += 1
        self.wiped[name] += wipe

    async def remove(self, name: str) -> None:
        await self._hang("remove")
        if self.failure is not None:
            raise self.failure
        self.names.discard(name)

    async def clear(self) -> Cleared:
        await self._hang("clear")
        if self.failure is not None:
            raise self.failure
        self.clears += 1
        return self.cleared.pop(0) if len(self.cleared) > 1 else self.cleared[0]

    async def found(self) -> frozenset[str]:
        await self._hang("found")
        if self.failure is not None:
            raise self.failure
        return frozenset(self.names)

    async def _hang(self, call: str) -> None:
        if self.hanging == call:
            await asyncio.Event().wait()
