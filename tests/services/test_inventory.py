"""The inventory: one change, one generation; what is held or not well never goes out of sight."""

import asyncio
import json
from collections import Counter
from pathlib import PurePosixPath
from typing import Any

import msgspec
import pytest

from agent.allocate.service import AllocateStep
from agent.errors import DriverError, StateError
from agent.gpu.nvml import bus_id
from agent.hami.annotations import told
from agent.inventory import (
    LEAST,
    SAMPLE_PERIOD,
    Discovery,
    InventoryKeeper,
    NodeCheck,
    Samples,
    Withholder,
)
from agent.kit.cell import Cell
from agent.kit.timing import loop_time
from agent.kubelet.door import encode_list
from agent.ledger import SourceFile
from agent.model import (
    Cause,
    Condition,
    Gpu,
    GpuFault,
    GpuSample,
    GpuUuid,
    Inventory,
    Scan,
    SharingSettings,
    SliceList,
    Trouble,
    slice_id,
)
from agent.settings.reading import Sources, make_plan
from agent.settings.schema import build
from agent.wire.v1beta1 import Device, ListAndWatchResponse
from tests import builders
from tests.builders import NODE, a_gpu, a_health, a_shared_gpu, a_uuid, an_inventory
from tests.fakes.clock import ManualClock
from tests.fakes.driver import ScriptedDriver
from tests.hami_vectors import Vector, cases, vectors
from tests.services.at_work import at_work

G0, G1, G2 = (a_uuid(number) for number in range(3))
BAD = a_health(condition=Condition.BAD, text="refused [H-RESET]")
FAULTS = {
    "lost": GpuFault(G1, "GPU is lost", Trouble.LOST),
    "silent": GpuFault(G1, "does not answer in time"),
    "refused": GpuFault(G1, "GPU requires restart"),
    "nameless": GpuFault("index 1", "GPU is lost", Trouble.LOST),
    "other": GpuFault("index 2", "Unknown Error"),
}
PLAIN = SharingSettings()
BY_UUID = SharingSettings(filter_uuids=frozenset({G1}))
BY_INDEX = SharingSettings(filter_indexes=frozenset({1}))


class KeepingBench:
    """What the driver says goes in, what is shared and listed comes out. `ill`: recalled as bad."""

    def __init__(self, settings: SharingSettings = PLAIN, ill: str = "") -> None:
        self.inventory = Cell(Inventory())
        self.slices = Cell(SliceList())
        recalled = {a_uuid(int(n)): BAD for n in ill}
        self.keeper = InventoryKeeper(
            self.inventory, Cell(settings), ManualClock(), recalled, slices=self.slices
        )

    def scan(self, *gpus: Gpu, faults: tuple[GpuFault, ...] = ()) -> None:
        self.keeper.found(Scan("570.1", gpus, faults))

    def do(self, step: str) -> None:
        """`hold 1`; `01 lost`: a scan that finds GPUs 0 and 1, and these faults; `-`: none."""
        first, *others = step.split()
        if first == "hold":
            self.keeper.hold({a_uuid(int(n)): (slice_id(a_uuid(int(n)), 3),) for n in others})
        else:
            found = [a_gpu(index=int(n)) for n in first if n != "-"]
            self.scan(*found, faults=tuple(FAULTS[word] for word in others))

    @property
    def shown(self) -> str:
        """Each GPU by index: `s` it serves, `p` present and ill, `k` kept out of the offer; `?`."""
        return " ".join(
            f"{'?' if gpu.gpu.index < 0 else gpu.gpu.index}"
            f"{'s' if gpu.serving else 'p' if gpu.present else 'k'}"
            for gpu in self.inventory.value.gpus
        )

    @property
    def left_out(self) -> str:
        """The GPUs that are said to be left out: those with names by their number."""
        numbers: dict[str, str] = {a_uuid(n): str(n) for n in range(10)}
        return " ".join(numbers.get(one.gpu, one.gpu) for one in self.keeper.left_out.value)


@pytest.mark.parametrize(
    ("settings", "ill", "steps"),
    [
        # One that vanished is gone unless a slice of it is held, and may come back.
        (PLAIN, "", "01 => 0s 1s; hold 1; 0 => 0s 1k; -; 01 => 0s 1s; 0; hold => 0s"),
        # Held ones that nobody has seen are named alone and take no index of another.
        (PLAIN, "", "hold 8 9; 0 => 0s ?k ?k; 01 => 0s 1s ?k ?k; 019 => 0s 1s 9s ?k"),
        # A lost one stays in view, and one that is silent for now stays as it was.
        (PLAIN, "", "01; 0 silent => 0s 1s; 0 lost => 0s 1k / 1"),
        # A filtered one is out without a word, but stays while it is held.
        *(
            (one, "", "01 => 0s; 0 lost => 0s; 01; 0 silent => 0s; 01; hold 1 => 0s 1k; 0 => 0s 1k")
            for one in (BY_UUID, BY_INDEX)
        ),
        (BY_UUID, "", "01; hold 1; 0; hold; 0 lost => 0s"),
        # One remembered as ill that the driver does not describe is in view until it is missed.
        (PLAIN, "1", "0 refused => 0s ?k / 1; 0 => 0s"),
        (PLAIN, "1", "0 lost => 0s ?k / 1"),
        *((BY_UUID, "1", f"0 {fault} => 0s") for fault in ("refused", "lost", "silent")),
        (BY_INDEX, "1", "0 nameless => 0s"),
        # The one fault without a name is the one that is missing, and tells its index.
        (PLAIN, "1", "0 nameless => 0s 1k / 1"),
        (PLAIN, "", "hold 1; 0 nameless => 0s 1k / 1"),
        (PLAIN, "12", "0 nameless other => 0s / index 1 index 2"),
    ],
)
def test_gpus_are_shared_kept_in_view_or_left_out(settings, ill, steps):
    bench = KeepingBench(settings, ill)
    for step in steps.split("; "):
        deed, _, expected = step.partition(" => ")
        bench.do(deed)
        shown, _, left_out = expected.partition(" / ")
        assert not expected or (shown, left_out) == (bench.shown, bench.left_out), deed


def test_a_scan_or_a_verdict_raises_the_generation_once_and_only_if_it_is_new():
    bench = KeepingBench()
    bench.do("01")
    before = bench.inventory.value
    bench.scan(a_gpu(index=1), a_gpu(index=0))
    assert before is bench.inventory.value
    for _ in range(2):
        bench.keeper.judged({G0: BAD, G1: BAD})

    assert ("0p 1p", 2) == (bench.shown, bench.inventory.value.generation)


@pytest.mark.parametrize(
    ("settings", "gpu", "says"),
    [
        (SharingSettings(mode="mig"), a_gpu(), "sharing.operatingMode"),
        (PLAIN, a_gpu(mig_enabled=True), "it is in MIG mode"),
        (PLAIN, a_gpu(memory_mib=None), "sharing.preconfiguredMemoryMiB"),
        (PLAIN, a_gpu(name=""), "does not report its name"),
    ],
)
def test_why_a_gpu_is_left_out_is_said(settings, gpu, says):
    bench = KeepingBench(settings)
    bench.scan(gpu)

    (why,) = bench.keeper.left_out.value
    assert "" == bench.shown
    assert says in why.text
    assert ("it is in MIG mode" in why.text) is gpu.mig_enabled
    assert why.index == gpu.index


@pytest.mark.parametrize("fault", ["refused", "lost"])
def test_one_in_view_alone_has_its_health_no_slice_and_no_place_in_the_annotation(fault):
    bench = KeepingBench(ill="1")
    bench.do(f"0 {fault}")
    kept = bench.inventory.value.gpus[1]

    assert (G1, BAD, False) == (kept.uuid, kept.health, kept.serving)
    assert (0, "is bad: refused [H-RESET]") == (kept.split_count, kept.unavailable_reason)
    assert (fault == "refused") is kept.there
    assert [10, 0] == [len(group.ids) for group in bench.slices.value.groups]
    assert [G0] == [gpu.uuid for gpu in told(bench.inventory.value)]
    bench.scan(a_gpu(index=0), faults=(msgspec.structs.replace(FAULTS[fault], index=1),))
    assert "0s 1k" == bench.shown


def test_many_gpus_that_go_bad_at_once_are_one_list_and_what_no_list_shows_is_none():
    bench = KeepingBench(SharingSettings(numa_topology=True))
    bench.scan(*(a_gpu(index=number) for number in range(3)), a_gpu(index=3, numa=1))
    lists = [bench.slices.value]
    bench.keeper.judged(dict.fromkeys((G0, G1, G2), BAD))
    lists.append(bench.slices.value)
    bench.keeper.judged({G0: a_health(condition=Condition.BAD, text="another text")})

    assert lists[-1] == bench.slices.value
    assert [1, 2] == [listed.generation for listed in lists]
    assert [[True] * 4, [False] * 3 + [True]] == [
        [group.healthy for group in listed.groups] for listed in lists
    ]
    assert [0, 0, 0, 1] == [group.numa for group in lists[0].groups]


# Samples: the newest use of each GPU, and no GPU that is not well is asked.


SILENT = msgspec.structs.replace(a_health(condition=Condition.UNMONITORED), cause=Cause.DRIVER)
LOST = a_health(condition=Condition.LOST)


class CountingDriver(ScriptedDriver):
    """Notes which GPU was asked for a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[GpuUuid] = Counter()

    async def sample(self, uuid: GpuUuid) -> GpuSample:
        self.asked[uuid] += 1
        return await super().sample(uuid)


@pytest.mark.parametrize(
    ("health", "of_all", "is_asked"),
    [
        (SILENT, {}, False),
        (LOST, {}, False),
        (a_health(), {"present": False, "there": False}, False),
        (BAD, {"present": False}, True),  # it may be filtered out and in use
    ],
    ids=["silent", "lost", "gone but held", "bad"],
)
async def test_a_gpu_that_cannot_answer_is_left_alone_until_it_can(health, of_all, is_asked):
    driver, inventory = CountingDriver(), Cell(an_inventory(count=2))
    samples = Samples(driver, inventory)
    async with at_work(samples.run):
        await asyncio.sleep(0.001)
        ill = a_shared_gpu(health=health, **of_all)
        inventory.set(an_inventory(gpus=[ill], generation=2))
        await asyncio.sleep(10 * SAMPLE_PERIOD)
        assert (11 if is_asked else 1) == driver.asked[G0]
        before = driver.asked[G0]
        inventory.set(an_inventory(count=2, generation=3))
        await asyncio.sleep(SAMPLE_PERIOD)

        assert before + 1 == driver.asked[G0]
        assert samples.newest(G0)


# Scans: at start, on demand, every minute; a driver that fails costs nothing that was found.


async def test_a_driver_that_fails_is_asked_after_1_2_4_up_to_30_s_and_at_once_on_demand():
    asked, start = list[float](), loop_time()

    class Failing(ScriptedDriver):
        async def scan(self) -> Scan:
            asked.append(round(loop_time() - start, 3))
            raise DriverError("Unknown Error")

    discovery = Discovery(Failing(), lambda _: None, ill=lambda _: False)
    async with at_work(discovery.run):
        await asyncio.sleep(5)
        discovery.rescan()
        await asyncio.sleep(85)

    assert [0, 1, 3, 5, 9, 17, 33, 63] == asked


@pytest.mark.parametrize("trouble", Trouble)
async def test_a_gpu_for_which_the_driver_fails_is_asked_for_sooner_than_one_that_needs_a_hand(
    trouble,
):
    found, start, driver = list[float](), loop_time(), ScriptedDriver()
    driver.faults = [GpuFault("index 0", "Unknown Error", trouble)]
    discovery = Discovery(
        driver, lambda _: found.append(round(loop_time() - start, 3)), ill=lambda _: False
    )
    async with at_work(discovery.run):
        await asyncio.sleep(4)
        driver.faults, driver.gpus = [], [a_gpu()]
        await asyncio.sleep(130)

    may_pass = trouble in {Trouble.LOST, Trouble.FAILED}
    assert [0, *((1, 3, 7) if may_pass else ()), 60, 120] == found


async def test_a_storm_of_refusals_makes_two_looks_a_second_and_changes_the_list_no_oftener():
    """The scenes of what is looked at are those of tests/app."""
    looks, changes = 0, []

    async def check() -> None:
        nonlocal looks
        looks += 1
        if looks % 2:
            raise StateError("/state is full.")

    place = NodeCheck(AllocateStep.WRITE, check)
    withholder = Withholder((place,), changes.append, lambda _: None)
    async with at_work(withholder.run):
        await asyncio.sleep(1)
        before = looks
        for _ in range(1000):
            withholder.look()
            await asyncio.sleep(0.01)

    assert 2 < looks - before <= 10 / LEAST + 1
    assert 2 < len(changes) <= looks


async def test_a_look_that_hangs_is_a_reason_and_holds_up_no_other_one():
    answers, looks, changes = asyncio.Event(), list[None](), []

    async def hang() -> None:
        await answers.wait()

    async def count() -> None:
        looks.append(None)

    checks = NodeCheck(AllocateStep.WRITE, hang), NodeCheck(AllocateStep.HOOK, count)
    withholder = Withholder(checks, changes.append, lambda _: None)
    async with at_work(withholder.run):
        await asyncio.sleep(60)
        (reason,) = withholder.reasons.value
        assert "the disk has not answered in time" in reason
        assert len(looks) > 60  # while slices are withheld it looks often
        answers.set()
        await asyncio.sleep(0.01)

    assert [reason, ""] == changes


async def test_nothing_is_offered_again_before_each_look_has_come_back():
    answers, looks, changes, news = asyncio.Event(), 0, [], []

    async def hang() -> None:
        await answers.wait()

    async def fails_once() -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise StateError("/state is full.")

    checks = NodeCheck(AllocateStep.WRITE, fails_once), NodeCheck(AllocateStep.HOOK, hang)
    withholder = Withholder(checks, changes.append, lambda event: news.append(event.reason))
    async with at_work(withholder.run):
        await asyncio.sleep(3)
        (reason,) = changes
        assert ((reason,), ["NothingOffered"]) == (withholder.reasons.value, news)
        answers.set()
        await asyncio.sleep(0.01)

    assert ([reason, ""], ["NothingOffered", "SlicesOffered"]) == (changes, news)


# Which GPUs are shared and how they are listed, against HAMi v2.10's own code.


# Which GPUs HAMi's `filterdevices` keeps out: from its config.json to what is shared.

FILTER = {"uuid": [builders.G1], "index": [2]}
MIG_DEVICE = "filter-137"


def offer(gpu: Gpu) -> tuple[bool, list[GpuUuid]]:
    """Whether the GPU is shared on a node with the filter, and what is said to be left out."""
    text = json.dumps({"nodeconfig": [{"name": NODE, "filterdevices": FILTER}]})
    given = Sources(node_config=SourceFile("n.json", text.encode()))
    settings = build(make_plan(given).resolve(NODE), host_name=NODE)
    inventory = Cell(Inventory())
    keeper = InventoryKeeper(inventory, Cell(settings.sharing), ManualClock())
    keeper.found(Scan("570.1", (gpu,)))
    shared = [one.uuid for one in inventory.value.gpus]
    return [gpu.uuid] == shared, [GpuUuid(fault.gpu) for fault in keeper.left_out.value]


def test_all_vectors_are_of_one_filter():
    assert {"filterdevices uuid=[G1] index=[2]"} == {one.name for one in vectors("filter").values()}


@pytest.mark.parametrize(
    "vector", cases("filter", without={MIG_DEVICE: "a part of a GPU, tested below"}), ids=str
)
def test_a_gpu_is_kept_out_where_hami_drops_it_and_shared_otherwise(vector: Vector):
    gpu = a_gpu(uuid=vector.given["uuid"], index=int(vector.given["index"]))
    dropped = vector.expected

    assert (not dropped, []) == offer(gpu)


def test_a_part_of_a_gpu_in_mig_mode_is_not_shared_whether_a_filter_names_it_or_not():
    """HAMi lists each part as `GPU:part`, which no filter by index can name.

    Here GPUs in MIG mode are not shared yet: the whole GPU is left out, with a word about it unless
    the filter names the GPU.
    """
    vector = vectors("filter")[MIG_DEVICE]
    index, _, part = vector.given["index"].partition(":")
    parent = a_gpu(index=int(index), mig_enabled=True)

    assert ("1", False) == (part, vector.expected)
    assert (False, [parent.uuid]) == offer(parent)
    assert (False, []) == offer(a_gpu(index=2, mig_enabled=True))


# The list for the kubelet against HAMi v2.10's own, down to the bytes that the kubelet reads.

BUS_IDS = "list_and_watch-245"


def shown(device: Device) -> dict[str, Any]:
    """A device as HAMi's vectors write it."""
    topology = device.topology
    nodes = [{"ID": node.id} for node in topology.nodes] if topology else []
    plain = {"ID": device.id, "health": device.health}
    return {**plain, "topology": {"nodes": nodes}} if nodes else plain


@pytest.mark.parametrize(
    "vector", cases("list_and_watch", without={BUS_IDS: "a path, tested below"}), ids=str
)
def test_one_gpu_becomes_the_devices_that_hami_lists(vector: Vector):
    given = vector.given
    settings = SharingSettings(
        split_count=given["deviceSplitCount"], numa_topology=given["enableNumaTopology"]
    )
    inventory, slices = Cell(Inventory()), Cell(SliceList())
    keeper = InventoryKeeper(inventory, Cell(settings), ManualClock(), slices=slices)
    gpu = a_gpu(uuid=given["uuid"], numa=given["numa"])
    assert "Unhealthy" == given["health"]
    keeper.judged({gpu.uuid: a_health(condition=Condition.BAD)})
    keeper.found(Scan("570.1", (gpu,)))

    frame = encode_list(slices.value)
    assert vector.expected == [
        shown(device) for device in ListAndWatchResponse.parse(frame).devices
    ]


def test_the_numa_node_is_looked_up_where_hami_looks():
    vector = vectors("list_and_watch")[BUS_IDS]
    looked_up = {
        text: PurePosixPath(path).parent.name
        for text, path in zip(vector.given, vector.expected, strict=True)
    }
    beyond = looked_up.pop("00010000:3B:00.0")  # sysfs writes no leading zero of such a domain

    assert looked_up == {text: bus_id(text) for text in looked_up}
    assert beyond.lstrip("0") == bus_id("00010000:3B:00.0")
