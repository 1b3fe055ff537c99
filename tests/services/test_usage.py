"""The use of containers: read in rounds, kept for a quarter of an hour, dropped with the row."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

import msgspec
import pytest
from structlog.testing import capture_logs

from agent.cluster import Phase, PodTable
from agent.hami.region import MemoryUse, RegionGpu, RegionProcess, RegionState
from agent.kit.cell import Cell
from agent.kit.timing import until_tick
from agent.ledger import ContainerKey, Ledger, Row, container_directory
from agent.model import MIB, GpuUuid, SharedGpu
from agent.usage import DEADLINE, FRESH, PERIOD, TURN, WRITE_DEADLINE, ContainerUsage
from tests.builders import G1, G2, POD_UID, a_gpu, a_pod, a_row, a_share, a_shared_gpu, an_inventory
from tests.fakes.clock import LoopClock
from tests.fakes.regions import MemoryRegions, RegionReading, a_process, a_region
from tests.services.at_work import at_work

MAIN, OTHER = ContainerKey(POD_UID, "main"), ContainerKey(POD_UID, "other")
GIB = 2**30


def directory(key: ContainerKey) -> str:
    return container_directory(key.pod_uid, key.container)


def gpu_of(uuid: GpuUuid, **fields) -> SharedGpu:
    """A GPU of 81,559 MiB."""
    return a_shared_gpu(gpu=a_gpu(uuid=uuid, memory_mib=81559), **fields)


class UsageBench:
    """The usage of containers with rows, whose regions are in memory."""

    def __init__(
        self,
        rows: Iterable[Row] = (a_row(), a_row(container="other")),
        uuids: Iterable[GpuUuid] = (G1, G2),
        *,
        switches: bool = False,
        observes: bool = False,
    ) -> None:
        self.regions = MemoryRegions()
        self.ledger = Cell(Ledger(tuple(rows)))
        self.pods = Cell(PodTable())
        self.inventory = Cell(an_inventory(gpus=[gpu_of(uuid) for uuid in uuids]))
        self.clock = LoopClock()
        self.usage = ContainerUsage(
            *(self.regions, self.ledger, self.pods, self.inventory, self.clock),
            switches=switches,
            observes=observes,
        )

    def uses(self, key: ContainerKey, *memory: int, sm: int = 0, uuids: tuple[str, ...] = (G1,)):
        """A process of that container uses so much."""
        region = a_region(*uuids, processes=(a_process(*memory, sm=sm),))
        self.regions.put(directory(key), region)


@contextlib.asynccontextmanager
async def sampling(bench: UsageBench) -> AsyncIterator[None]:
    """From a tick on, so that the second round is a whole period later."""
    await asyncio.sleep(until_tick(PERIOD, TURN))
    async with at_work(bench.usage.run):
        await asyncio.sleep(0.001)
        yield


async def test_all_regions_are_read_in_one_call_every_five_seconds_for_the_gpus_of_their_rows():
    bench = UsageBench()
    bench.uses(MAIN, GIB, sm=40)
    async with sampling(bench):
        bench.uses(MAIN, 2 * GIB, sm=50, uuids=(G2,))
        await asyncio.sleep(PERIOD)
        newest = bench.usage.newest(MAIN)
        absent = bench.usage.newest(OTHER)

    assert 2 * [(directory(MAIN), directory(OTHER))] == bench.regions.reads
    (gpu,) = newest.gpus
    assert (G1, 2 * GIB, 50) == (gpu.uuid, gpu.memory.total, gpu.sm_percent)
    assert RegionState.ABSENT == absent.state


async def test_why_regions_cannot_be_read_is_logged_once_and_once_more_after_they_could():
    bench = UsageBench()
    with capture_logs() as logs:
        async with sampling(bench):
            for text in ("no disk", "read-only", "", "read-only"):
                bench.regions.broken = text
                await asyncio.sleep(3 * PERIOD)

    assert ["no disk", "read-only", "read-only"] == [line["err"] for line in logs]


async def test_a_silent_disk_delays_no_round_for_long_and_nothing_old_is_shown():
    bench = UsageBench()
    bench.uses(MAIN, GIB)
    async with sampling(bench):
        bench.regions.hangs = True
        await asyncio.sleep(PERIOD)
        assert bench.usage.newest(MAIN) is not None
        await asyncio.sleep(FRESH)
        assert bench.usage.newest(MAIN) is None
        bench.regions.hangs = False
        await asyncio.sleep(PERIOD + DEADLINE)
        assert bench.usage.newest(MAIN) is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"processes": (a_process(81_560 * MIB),)},
        {"processes": tuple(a_process(2**62, pid=pid) for pid in range(1, 1025))},
        {"processes": (a_process(41_000 * MIB), a_process(41_000 * MIB, pid=2))},
        {"processes": (RegionProcess(1, (MemoryUse(context=2**50),), (0,)),)},
        {"processes": (a_process(GIB, sm=101),)},
        {"processes": tuple(a_process(0, sm=2, pid=pid) for pid in range(1, 1025))},
        {"processes": (a_process(GIB, sm=2**64 - 1),)},
        {"gpus": (RegionGpu(G1, 2**63),)},
    ],
    ids=["memory", "huge", "sum", "part", "percent", "many percents", "u64", "limit"],
)
async def test_more_than_the_gpu_has_is_not_believed_and_the_reason_is_shown(fields):
    bench = UsageBench()
    bench.regions.put(directory(MAIN), a_region(G1, **fields))
    bench.uses(OTHER, GIB)
    async with sampling(bench):
        newest, other = bench.usage.newest(MAIN), bench.usage.newest(OTHER)

    assert (RegionState.UNREADABLE, (), 0) == (newest.state, newest.gpus, newest.processes)
    assert newest.reason.startswith("not believable: it says ")
    assert GIB == other.gpus[0].memory.total


@pytest.mark.parametrize(
    ("gpu", "promised", "used", "sm"),
    [
        (gpu_of(G1), 0, (81_559 * MIB,), 100),
        (gpu_of(G1, registered_mib=163_118), 0, (160_000 * MIB,), 0),
        (gpu_of(G1, registered_mib=40_000), 0, (80_000 * MIB,), 0),
        (gpu_of(G1), 120_000, (119_000 * MIB,), 0),
        (a_shared_gpu(gpu=a_gpu(uuid=G2)), 0, (200_000 * MIB,), 0),
        (gpu_of(G1), 0, (GIB,) * 3, 90),
    ],
    ids=["all", "scaled up", "scaled down", "scaled up before", "unknown GPU", "three processes"],
)
async def test_what_the_gpu_can_have_is_believed(gpu, promised, used, sm):
    bench = UsageBench()
    bench.inventory.set(an_inventory(gpus=[gpu]))
    bench.ledger.set(Ledger().put(a_row(shares=[a_share(uuid=G1, memory_mib=promised)])))
    processes = tuple(a_process(size, sm=sm, pid=pid) for pid, size in enumerate(used, 1))
    bench.regions.put(directory(MAIN), a_region(G1, processes=processes))
    async with sampling(bench):
        newest = bench.usage.newest(MAIN)

    assert (sum(used), len(used) * sm) == (newest.gpus[0].memory.total, newest.gpus[0].sm_percent)


@pytest.mark.parametrize(
    "pods", [(), (a_pod(uid=POD_UID, phase=Phase.SUCCEEDED),)], ids=["gone", "ended"]
)
async def test_a_pod_that_is_gone_or_has_ended_uses_nothing(pods):
    bench = UsageBench()
    bench.uses(MAIN, GIB, sm=40)
    async with sampling(bench):
        assert bench.usage.newest(MAIN) is not None
        bench.pods.set(PodTable({pod.uid: pod for pod in pods}, synced=True))
        await asyncio.sleep(PERIOD)

        assert bench.usage.newest(MAIN) is None


# Feedback at work: what is written, by whom, and that it is released however the agent ends.


HIGH, LOW = (container_directory(POD_UID, name) for name in ("high", "low"))
LIVE = frozenset({1})
TROUBLES = "unread", "read_only", "broken"


class FeedbackBench(UsageBench):
    """Two containers of one GPU, of priorities 0 and 1."""

    def __init__(self, *, switches: bool = True, observes: bool = False) -> None:
        rows = [
            msgspec.structs.replace(a_row(container=name), priority=number)
            for number, name in enumerate(("high", "low"))
        ]
        super().__init__(rows, switches=switches, observes=observes)
        self.idle(HIGH, priority=0)
        self.idle(LOW)

    def work(self, name: str) -> None:
        """A kernel of the container runs."""
        region = self.regions.region(name)
        processes = (a_process(2**30, sm=50),)
        region = msgspec.structs.replace(region, processes=processes, last_kernel=self.clock.now())
        self.regions.put(name, region, LIVE)

    def idle(self, name: str, **fields) -> None:
        """Nothing of the container runs, nor has it lately."""
        region = a_region(G1, **({"recent_kernel": 0, "is_limiting": False} | fields))
        self.regions.put(name, region, LIVE)

    def state(self, name: str) -> tuple[int, bool]:
        """recent_kernel and the utilisation switch."""
        region = self.regions.region(name)
        return region.recent_kernel, region.is_limiting


async def test_who_used_a_multiprocessor_holds_back_others_for_ten_seconds():
    """HAMi-core does not see the kernels of CUDA graphs."""
    bench = FeedbackBench()
    bench.work(HIGH)
    async with sampling(bench):
        bench.idle(HIGH, priority=0)
        await asyncio.sleep(PERIOD)
        assert (-1, True) == bench.state(LOW)
        await asyncio.sleep(2 * PERIOD)
        assert (0, False) == bench.state(LOW)


async def test_the_end_releases_all_that_was_held_back_and_is_not_delayed_by_a_silent_disk():
    bench, loop = FeedbackBench(), asyncio.get_running_loop()
    bench.work(HIGH)
    async with sampling(bench):
        assert (-1, True) == bench.state(LOW)
    assert (0, False) == bench.state(LOW)
    with capture_logs() as logs:
        async with sampling(bench):
            assert (-1, True) == bench.state(LOW)
            bench.regions.hangs = True
            ended = loop.time()

    assert WRITE_DEADLINE == pytest.approx(loop.time() - ended)
    assert ["usage.unwritten"] == [line["event"] for line in logs]


@pytest.mark.parametrize("held", [-1, -5, -(2**31)])
@pytest.mark.parametrize(("switches", "is_known"), [(True, True), (True, False), (False, False)])
async def test_whom_an_agent_that_was_killed_held_back_is_released_in_the_first_round(
    held, switches, is_known
):
    bench = FeedbackBench(switches=switches)
    if not is_known:
        bench.ledger.set(Ledger())
    bench.idle(LOW, recent_kernel=held, is_limiting=is_known)
    async with sampling(bench):
        assert (0, False) == bench.state(LOW)


@pytest.mark.parametrize(
    ("observes", "trouble"), [(False, ""), (True, ""), *((False, t) for t in TROUBLES)]
)
async def test_with_feedback_off_who_was_held_back_is_released_once_and_not_limited_anew(
    observes, trouble
):
    """A disk that refuses it is asked again. An observer releases nobody."""
    bench = FeedbackBench(switches=False, observes=observes)
    bench.idle(LOW, recent_kernel=-1, is_limiting=True)
    setattr(bench.regions, trouble or "broken", "no disk" if trouble else "")
    async with sampling(bench):
        await asyncio.sleep(2 * PERIOD)
        assert (-1 if observes or trouble else 0, True) == bench.state(LOW)
        setattr(bench.regions, trouble or "broken", "")
        await asyncio.sleep(PERIOD)
        assert (-1 if observes else 0, True) == bench.state(LOW)
        bench.idle(LOW, recent_kernel=-1)
        await asyncio.sleep(3 * PERIOD)
        assert (-1, False) == bench.state(LOW)  # by the monitor that runs beside the agent

    assert bool(bench.regions.writes) == (not observes)


@pytest.mark.parametrize("name", [LOW, HIGH, "all of them, for long"])
async def test_nobody_is_held_back_by_or_in_a_region_that_is_not_readable(name):
    bench = FeedbackBench()
    bench.work(HIGH)
    async with sampling(bench):
        assert (-1, True) == bench.state(LOW)
        if name in (LOW, HIGH):
            bench.regions.unseen[name] = RegionReading(RegionState.UNREADABLE, None, "cut off")
        else:
            bench.regions.unread = "no disk"
            await asyncio.sleep(FRESH - PERIOD)
            assert (-1, True) == bench.state(LOW)
            await asyncio.sleep(PERIOD)
        await asyncio.sleep(PERIOD)
        assert (0, False) == bench.state(LOW)


async def test_a_write_that_fails_is_logged_once_and_tried_again():
    bench = FeedbackBench()
    bench.regions.read_only = "no disk"
    with capture_logs() as logs:
        async with sampling(bench):
            for _ in range(3):
                bench.work(HIGH)
                await asyncio.sleep(PERIOD)
            assert (0, False) == bench.state(LOW)
            bench.regions.read_only = ""
            bench.work(HIGH)
            await asyncio.sleep(PERIOD)
            assert (-1, True) == bench.state(LOW)

    assert [("usage.unwritten", "no disk")] == [(line["event"], line["err"]) for line in logs]
