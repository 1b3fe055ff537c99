"""An outbox on a fake API server: real ledger, disk in memory, virtual time."""

import contextlib
from collections.abc import AsyncIterator, Mapping

import msgspec

from agent.cluster import Phase, PodTable, PodUid, PodView
from agent.kit.cell import Cell
from agent.ledger import Effect, EffectKind, Ledger, State
from agent.settle import Outbox, OutboxViews
from agent.state import StateService
from tests.builders import G1, NOON, a_lock, a_pod, a_pod_uid
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import NoChance
from tests.fakes.clock import LoopClock
from tests.fakes.disk import MemoryDisk
from tests.services.at_work import at_work

GROUPS = f"{G1},NVIDIA,1000,10:;{G1},NVIDIA,2000,20:;"
LOCK = a_lock().value


def a_placed_pod(number: int = 0, phase: Phase = Phase.PENDING) -> PodView:
    """A pod with two groups, being allocated."""
    return a_pod(
        uid=a_pod_uid(number),
        name=f"train-{number}",
        phase=phase,
        annotations={
            "hami.io/vgpu-devices-to-allocate": GROUPS,
            "hami.io/bind-phase": "allocating",
        },
    )


def settling(pod: PodView, **changes: object) -> Effect:
    """What is owed to a pod that was answered in full."""
    effect = Effect(
        kind=EffectKind.SETTLE_POD,
        pod_uid=pod.uid,
        namespace=pod.namespace,
        pod=pod.name,
        due=NOON,
        phase="success",
        groups=(0, 1),
    )
    return msgspec.structs.replace(effect, **changes)


def releasing(pod: PodView, value: str = LOCK) -> Effect:
    """The pod's lock is owed to the scheduler."""
    return settling(pod, kind=EffectKind.RELEASE_LOCK, phase="", groups=(), value=value)


def telling(pod: PodView) -> Effect:
    """An Event is owed to the pod's owner."""
    return settling(
        pod, kind=EffectKind.POST_EVENT, phase="", groups=(), value="no", reason="Refused"
    )


class Owing:
    """What a test of the outbox holds in its hands."""

    def __init__(self, *pods: PodView, ledger: Ledger, api: FakeApi) -> None:
        self.clock = LoopClock(NOON)
        self.disk = MemoryDisk()
        self.api = api
        self.api.create_node({"hami.io/mutex.lock": LOCK})
        for pod in pods:
            self.api.put_pod(pod)
        self.pods: Cell[PodTable] = Cell(PodTable())
        self.found: Cell[tuple[Effect, ...]] = Cell(())
        self.outlived: Cell[Mapping[str, PodUid]] = Cell({})
        self.state = StateService(disk=self.disk, recovered=State(ledger=ledger), boot_id="b")
        self.see()
        self.outbox = self.another()

    def another(self) -> Outbox:
        """An outbox that knows nothing but the ledger, as after a restart."""
        return Outbox(
            views=OutboxViews(self.state.ledger, self.pods, self.found, self.outlived),
            nodes=self.api,
            pods=self.api,
            commit=self.state.commit,
            clock=self.clock,
            random=NoChance(),
        )

    @property
    def owed(self) -> tuple[Effect, ...]:
        return self.state.ledger.value.outbox

    @property
    def results(self) -> dict[tuple[str, ...], int]:
        return dict(self.outbox.results.items())

    def see(self) -> None:
        """The pod watch has caught up with the API server."""
        pods = {pod.uid: pod for pod in self.api.pods.values()}
        self.pods.set(PodTable(pods, synced=True))

    def annotations(self, pod: PodView) -> dict[str, str]:
        return dict(self.api.pods[pod.key].annotations)

    @property
    def locked(self) -> bool:
        assert self.api.node is not None
        return "hami.io/mutex.lock" in self.api.node.annotations

    async def owe(self, *effects: Effect) -> None:
        def change(ledger: Ledger) -> Ledger:
            for effect in effects:
                ledger = ledger.owe(effect)
            return ledger

        await self.state.commit(change)


@contextlib.asynccontextmanager
async def owing(
    *pods: PodView, ledger: Ledger | None = None, api: FakeApi | None = None
) -> AsyncIterator[Owing]:
    """A running outbox."""
    held = Owing(*pods, ledger=ledger or Ledger(), api=api or FakeApi())
    async with at_work(held.state.run, held.outbox.run):
        yield held
