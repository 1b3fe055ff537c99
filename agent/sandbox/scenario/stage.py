"""What every step of the scenario gets: its pods, its claims with their record, and the stage.

While the scenario runs, each answer is checked as it arrives: is it on disk, and do the sums fit?
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.cluster import PodUid
from agent.errors import StateCorrupt
from agent.ledger import ContainerKey
from agent.model import Gpu, GpuUuid
from agent.sandbox.kubelet.pods import KubeletEvent, PodSpec, SeenKind
from agent.sandbox.lab.child import AgentChild
from agent.sandbox.lab.cluster import NAMESPACE, RESOURCE, SandboxCluster
from agent.sandbox.scenario.facts import (
    Answers,
    PodFacts,
    answers,
    ledger_on_disk,
    parsed,
    promised,
)
from agent.sandbox.scheduler.model import CORES, COUNT, MEMORY, Load
from agent.sandbox.store import Json

# The pods of the scenario, and the Pod objects that users would write for them.

USE_UUID: Final = "nvidia.com/use-gpuuuid"


@dataclass(frozen=True, slots=True)
class Wish:
    """One container and its request; `gpus` 0: no GPU."""

    name: str
    gpus: int = 0
    memory_mib: int = 0
    core_percent: int = 0
    init: bool = False

    def container(self) -> Json:
        """The container as a user writes it, without limits of 0."""
        asked = {COUNT: self.gpus, MEMORY: self.memory_mib, CORES: self.core_percent}
        limits = {name: str(count) for name, count in asked.items() if count}
        resources = {"resources": {"limits": limits}} if limits else {}
        return {"name": self.name, "image": "sandbox", **resources}


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
        metadata = {"name": self.name, "namespace": NAMESPACE, "annotations": notes}
        spec: Json = {"containers": [w.container() for w in self.wishes if not w.init]}
        if inits := [w.container() for w in self.wishes if w.init]:
            spec["initContainers"] = inits
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


_TRIO = (Wish("left", 1, 1024), Wish("plain"), Wish("right", 1, 2048, 20))
_PREPARED = (Wish("load", 1, 1024, init=True), Wish("main", 1, 2048))
PLACED: Final = (
    Workload("one", "one GPU with a memory and a core limit", (Wish("main", 1, 4096, 30),)),
    Workload("pair", "two GPUs in one container", (Wish("main", 2, 2048),)),
    Workload("trio", "three containers, one of them without a GPU", _TRIO),
    Workload("prepared", "an init container with a GPU", _PREPARED),
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


def plain(name: str) -> Workload:
    """A pod with one small share of any GPU."""
    return Workload(name, "a small share", (Wish("main", 1, 512),))


# Every claim of the default scenario, with the results, the timeline and the measurements.

NOT_REACHED: Final = "the scenario ended before"
_EACH: Final = (
    ("running", "pod {} runs"),
    ("edits", "pod {} has what the scheduler wrote"),
    ("settled", "pod {} is settled, the lock is free"),
)


def promises(gpus: int, split_count: int) -> Mapping[str, str]:
    """Claim id → sentence, for a node with that many GPUs and slices for each."""
    whole, rest = gpus * split_count, (gpus - 1) * split_count
    return {
        "registered": "the agent registers with the kubelet",
        "allocatable": f"{whole} slices are allocatable on the Node",
        "annotation": f"the register annotation names {gpus} healthy GPUs",
        **{f"{one.name}.{claim}": text.format(one.name) for one in PLACED for claim, text in _EACH},
        "too-big.pending": "a pod that cannot fit stays Pending with a reason",
        "requests": "each GPU pod costs two writes, at most one read for each answer and one more",
        "used": "the metrics say what each container uses of its GPUs",
        "xid.allocatable": f"one GPU is gone: {rest} allocatable",
        "xid.annotation": "the register annotation shows it as unhealthy",
        "xid.running": "the pod on it stays Running",
        "xid.avoided": "no new pod is placed on it",
        "kubelet.allocatable": f"after the kubelet's restart {rest} are allocatable",
        "kubelet.untouched": "no container was affected or allocated again",
        "kill.allocatable": f"after the SIGKILL {rest} are allocatable, never {whole}",
        "kill.rows": "the new agent has every row of the ledger",
        "kill.untouched": "no container was affected or allocated again",
        "burst.pods": "every pod is served, or was rejected in the gap",
        "burst.edits": "every pod that is served has what the scheduler wrote",
        "burst.durable": "no acknowledged answer is lost",
        "burst.lock": "the node lock is free again",
        "replay.edits": "a repeated Allocate gets the same answer, byte for byte",
        "disk_first": "every answer was on disk before the kubelet had it",
        "sums": "no GPU was ever oversold",
        "idle": "when idle: no write, no read, two watches",
        "stop": "SIGTERM ends the agent cleanly",
    }


@dataclass(frozen=True, slots=True)
class ScenarioClaim:
    """One claim and its result. `measured`: what the check found."""

    id: str
    sentence: str
    ok: bool
    measured: str


@dataclass(frozen=True, slots=True)
class Moment:
    """One entry of the timeline, `elapsed` seconds after its start; `ok` None: not a claim."""

    elapsed: float
    text: str
    detail: str = ""
    ok: bool | None = None
    claim: str = ""


class Unmet(Exception):  # noqa: N818 -- a claim that was not met, not an error of ours
    """A wait had no result, so the scenario cannot continue."""


@dataclass(eq=False, slots=True)
class ScenarioRecord:
    """The record that the steps fill. `promised`: claim id → sentence, in order."""

    promised: Mapping[str, str]
    tell: Callable[[Moment], None]
    started: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    moments: list[Moment] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    _found: dict[str, tuple[bool, str]] = field(default_factory=dict)

    def note(self, text: str, detail: str = "", *, ok: bool | None = None, claim: str = "") -> None:
        """Add an entry to the timeline."""
        elapsed = asyncio.get_running_loop().time() - self.started
        self.moments.append(Moment(elapsed, text, detail, ok, claim))
        self.tell(self.moments[-1])

    def settle(self, claim: str, measured: str, problems: Iterable[str] = ()) -> None:
        """Set the result of one claim: true without problems. A false claim stays false.

        Raises KeyError: the claim is not in `promised`.
        """
        sentence, found = self.promised[claim], list(problems)
        ok = self._found.get(claim, (True, ""))[0] and not found
        text = "; ".join(found) if found else measured
        self._found[claim] = (ok, text)
        self.note(sentence, text, ok=ok, claim=claim)

    @property
    def claims(self) -> tuple[ScenarioClaim, ...]:
        """Every promised claim. One that was not checked is not true."""
        return tuple(
            ScenarioClaim(name, sentence, *self._found.get(name, (False, NOT_REACHED)))
            for name, sentence in self.promised.items()
        )

    @property
    def ok(self) -> bool:
        """Whether every claim was checked and true."""
        return all(claim.ok for claim in self.claims)


# The stage, with the checks of each answer as it arrives.

PATIENCE = 20.0
"""Seconds for a wait that should be much shorter. A busy machine may need them for a start."""
KEPT_IDLE = 5.0
"""The length of the idle step in seconds."""


@dataclass(eq=False, slots=True)
class DiskWatch:
    """Counts the answers that were checked, and lists those missing in the state file."""

    cluster: SandboxCluster
    checks: int = 0
    problems: list[str] = field(default_factory=list)

    def hear(self, event: KubeletEvent) -> None:
        """When the kubelet gets an answer, check that its row is in the state file."""
        if event.kind != "allocated":
            return
        self.checks += 1
        try:
            ledger = ledger_on_disk(self.cluster)
        except (OSError, StateCorrupt) as error:
            self.problems.append(f"{event.container} of {event.pod}: {error}")
            return
        row = ledger.find(ContainerKey(PodUid(event.pod), event.container))
        if row is None or sorted(row.slice_ids) != sorted(event.ids):
            self.problems.append(f"{event.container} of {event.pod} is not on disk")


@dataclass(eq=False, slots=True)
class SumWatch:
    """The greatest use of one GPU so far, and every case in which it was too much."""

    cluster: SandboxCluster
    gpus: Mapping[GpuUuid, Gpu]
    split_count: int
    most: Load = field(default_factory=Load)
    checks: int = 0
    problems: list[str] = field(default_factory=list)

    def hear(self, event: KubeletEvent) -> None:
        """Check again after each admission, when the answers are in the kubelet's checkpoint."""
        if event.kind != "admitted":
            return
        self.checks += 1
        kept, total = answers(self.cluster), defaultdict[GpuUuid, Load](Load)
        try:
            for pod in self.cluster.kubelet.node.pods.values():
                if pod.admission is not None and pod.admission.admitted:
                    for uuid, use in pod_use(pod.spec, kept).items():
                        total[uuid] += use
        except ValueError as error:
            self.problems.append(f"an answer cannot be read: {error}")
            return
        for uuid, use in total.items():
            self.most = self.most.greater(use)
            gpu = self.gpus.get(uuid)
            room = Load(self.split_count, (gpu.memory_mib or 0) if gpu else 0, 100)
            if use.greater(room) != room:
                told = f"{use.memory_mib} MiB, {use.core_percent} %, {use.slots} slices"
                self.problems.append(f"GPU {uuid or 'without a name'} was promised {told}")


def pod_use(spec: PodSpec, kept: Answers) -> Mapping[GpuUuid, Load]:
    """Per GPU: max(peak of init containers beside sidecars before them, sidecars and apps)."""
    lasting: defaultdict[GpuUuid, Load] = defaultdict(Load)
    peaks: defaultdict[GpuUuid, Load] = defaultdict(Load)
    for container in spec.containers:
        answer = kept.get((spec.uid, container.name))
        limits = promised(parsed(answer)) if answer is not None else {}
        for uuid, (memory_mib, percent) in limits.items():
            both = lasting[uuid] + Load(1, memory_mib, percent)
            if container.kind != "init":
                lasting[uuid] = both
            peaks[uuid] = peaks[uuid].greater(both)
    return peaks


@dataclass(eq=False, slots=True)
class Stage:
    """One run of the scenario. `placed`: the names of running pods. `ill`: the lost GPU."""

    cluster: SandboxCluster
    record: ScenarioRecord
    gpus: Mapping[GpuUuid, Gpu]
    split_count: int
    sums: SumWatch
    disk: DiskWatch
    placed: list[str] = field(default_factory=list)
    ill: GpuUuid | None = None

    @property
    def slices(self) -> int:
        """The number of slices on healthy GPUs."""
        return (len(self.gpus) - (self.ill is not None)) * self.split_count

    @property
    def now(self) -> float:
        """The loop's time."""
        return asyncio.get_running_loop().time()

    def seen(self, since: float, *kinds: SeenKind) -> list[KubeletEvent]:
        """The kubelet's events since the loop time `since`."""
        events = self.cluster.kubelet.history.of(*kinds)
        return [event for event in events if event.elapsed >= since]

    async def start_agent(self) -> AgentChild:
        """Start an agent and note it."""
        child = await self.cluster.start_agent()
        self.record.note(f"agent started, pid {child.pid}")
        return child

    @property
    def published(self) -> int:
        """The number of slices on the Node."""
        return int(self.cluster.node()["status"].get("allocatable", {}).get(RESOURCE, "0"))

    async def until(self, claim: str, holds: Callable[[], bool], within: float = PATIENCE) -> None:
        """Wait for a condition of the claim.

        Raises Unmet: it did not come, or the agent has ended; the claim is false.
        """
        agent = self.cluster.agent
        await self.cluster.until(lambda: holds() or agent.code is not None, within)
        if not holds():
            code, cluster = agent.code, self.cluster
            why = f"not in {within:g} s" if code is None else f"the agent exited with {code}"
            told = [f"{why}: {cluster.allocatable()} at the kubelet, {self.published} on the Node"]
            pods = map(PodFacts, cluster.store.select("pods"))
            told += [f"pod {pod.name} is {pod.phase} {pod.reason}".rstrip() for pod in pods]
            told.append(f"the Node's annotations are {dict(cluster.node_annotations())}")
            self.record.settle(claim, "", told)
            raise Unmet(claim)

    def settle(self, claim: str, measured: str, problems: Iterable[str] = ()) -> None:
        """Set the result of a claim; see ScenarioRecord.settle."""
        self.record.settle(claim, measured, problems)

    def measure(self, name: str, seconds: float) -> str:
        """Record a measured time, and return it in words."""
        self.record.measured[name] = round(seconds, 6)
        return milliseconds(seconds)


def milliseconds(seconds: float) -> str:
    """A time in milliseconds, in words."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
