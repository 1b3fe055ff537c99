"""The inventory: one change, one generation; what is held or not well never goes out of sight."""

import msgspec
import pytest

from agent.hami.annotations import told
from agent.inventory import InventoryKeeper
from agent.kit.cell import Cell
from agent.model import (
    Condition,
    Gpu,
    GpuFault,
    Inventory,
    Scan,
    SharingSettings,
    SliceList,
    Trouble,
    slice_id,
)
from tests.builders import a_gpu, a_health, a_uuid
from tests.fakes.clock import START, ManualClock

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


def test_nothing_is_published_or_listed_before_the_first_scan():
    bench = KeepingBench()
    bench.keeper.judged({G0: BAD})
    bench.do("hold 0")

    assert (Inventory(), SliceList()) == (bench.inventory.value, bench.slices.value)
    bench.do("hold")
    bench.scan()
    assert SliceList(generation=1) == bench.slices.value


def test_a_found_gpu_is_shared_as_the_settings_say_and_is_ok_from_then_on():
    bench = KeepingBench(SharingSettings(split_count=4, memory_scaling=1.5, core_scaling=0.5))
    bench.scan(a_gpu(name="Tesla T4", memory_mib=15361))
    gpu = bench.inventory.value.gpus[0]

    assert (4, 23041, 50) == (gpu.split_count, gpu.registered_mib, gpu.core_percent)
    assert ("NVIDIA-Tesla T4", "hami-core") == (gpu.type_name, gpu.mode)
    assert (Condition.OK, START) == (gpu.health.condition, gpu.health.since)


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
