"""The real pynvml over a library of our own: what only a real library file shows."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from functools import partial

import pytest

from agent.gpu.driver import NvmlDriver
from agent.gpu.nvml import pynvml as the_library
from agent.model import (
    DriverEvent,
    EventKind,
    FabricState,
    GpuSample,
    GpuSigns,
    GpuUuid,
    PciPath,
    ProbeOutcome,
    RecoveryAction,
)
from tests.fakes import nvml_stub
from tests.fakes.nvml import until

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

PATIENT = 1.5
"""Seconds that stand out from what a busy machine takes for everything else."""
UUIDS = [GpuUuid(f"GPU-5708-{slot}") for slot in range(16)]


@pytest.fixture
def driver(stub_driver: NvmlDriver) -> NvmlDriver:
    return stub_driver


def listen(driver: NvmlDriver) -> AsyncGenerator[DriverEvent, None]:
    events = driver.events()
    assert isinstance(events, AsyncGenerator)
    return events


async def hears(driver: NvmlDriver, cause) -> DriverEvent:
    """The first event; `cause` is repeated until it is heard."""
    events = listen(driver)
    async with contextlib.aclosing(events), asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        heard = tasks.create_task(events.__anext__())
        while not heard.done():
            cause()
            await asyncio.wait([heard], timeout=0.02)
    return heard.result()


async def test_a_named_library_is_used(driver):
    scan = await driver.scan()

    assert ("999.1", "12.999.1", ()) == (scan.driver_version, scan.library_version, scan.faults)
    assert UUIDS[:3] == [gpu.uuid for gpu in scan.gpus]
    assert ["0000:af:00.0", "0000:b0:00.0", "0000:b1:00.0"] == [gpu.pci for gpu in scan.gpus]
    assert [16384, 16384, None] == [gpu.memory_mib for gpu in scan.gpus]
    assert [(PciPath.SAME_CPU, 0, True)] * 2 == [
        (link.path, link.nvlinks, link.peer_to_peer) for link in scan.gpus[0].links
    ]


async def test_a_gpu_in_a_domain_beyond_four_digits_keeps_its_numa_node(driver, stub, tmp_path):
    stub.set(1, domain=0x10000)
    folder = tmp_path / "bus/pci/devices/10000:b0:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    gpu = (await driver.scan()).gpus[1]

    assert ("10000:b0:00.0", 1) == (gpu.pci, gpu.numa)
    await driver.release([UUIDS[0]])  # the others are found by that address
    assert UUIDS[1] in [one.uuid for one in (await driver.scan()).gpus]


async def test_switched_links_and_peers_are_counted(driver, stub):
    for slot in range(3):
        stub.set(slot, nvlinks=18 - slot, peer_to_peer=slot)
    scan = await driver.scan()

    assert [[17, 16], [17, 16], [16, 16]] == [
        [link.nvlinks for link in gpu.links] for gpu in scan.gpus
    ]
    assert [[True] * 2, [False] * 2, [False] * 2] == [
        [link.peer_to_peer for link in gpu.links] for gpu in scan.gpus
    ]


async def test_the_signs_come_through_the_librarys_structures(driver, stub):
    stub.set(1, rows_corrected=3, rows_uncorrected=1, rows_pending=1, pages_pending=1)
    stub.set(1, pages_single=2, pages_double=5, ecc_corrected=17, ecc_uncorrected=2, recovery=4)

    assert (
        GpuSigns(
            rows_pending=True,
            rows_failed=False,
            rows_remapped=4,
            pages_pending=True,
            pages_retired=7,
            ecc_corrected=17,
            ecc_uncorrected=2,
            recovery=RecoveryAction.DRAIN_AND_RESET,
        )
        == (await driver.probe(UUIDS[1])).signs
    )


@pytest.mark.parametrize(
    ("fabric", "status", "state"),
    [
        (0, 0, None),
        (1, 0, FabricState.NOT_STARTED),
        (2, 0, FabricState.IN_PROGRESS),
        (3, 0, FabricState.COMPLETED),
        (3, 999, FabricState.FAILED),
    ],
)
async def test_whether_a_gpu_has_joined_its_fabric_is_told(driver, stub, fabric, status, state):
    stub.set(1, fabric=fabric, fabric_status=status)

    assert state is (await driver.probe(UUIDS[1])).signs.fabric


async def test_use_comes_through_the_librarys_structures(driver, stub):
    stub.set(0, gpu_percent=93, memory_percent=41, used=7 << 30, reserved=616 << 20)
    stub.set(0, celsius=41, milliwatts=70_150, ecc_life_corrected=9, ecc_life_uncorrected=-1)

    wanted = GpuSample(UUIDS[0], 93, 41, 7168, 616, 41, 70_150, 9, None)
    assert wanted == await driver.sample(UUIDS[0])


async def test_which_gpu_is_in_mig_mode_comes_through_the_library(driver, stub):
    stub.set(1, mig=1)

    assert [False, True, False] == [gpu.mig_enabled for gpu in (await driver.scan()).gpus]


async def test_calls_that_an_old_driver_lacks_cost_nothing(tmp_path):
    library = nvml_stub.build(tmp_path, "-DOLD_DRIVER")
    driver = NvmlDriver(the_library(), path=library, sys_root=tmp_path)
    scan = await driver.scan()
    probe = await driver.probe(scan.gpus[0].uuid)
    stub = nvml_stub.NvmlStub(library)
    stub.set(0, used=3 << 30, reserved=1 << 30)

    assert (4096, 0) == (
        (sample := await driver.sample(scan.gpus[0].uuid)).used_mib,
        sample.reserved_mib,
    )
    assert [0, 0] == [link.nvlinks for link in scan.gpus[0].links]
    assert ProbeOutcome.PASSED is probe.outcome
    assert (None, None) == (
        probe.signs.rows_failed,
        probe.signs.recovery,
    )
    await driver.close()


async def test_a_name_that_is_no_text_is_a_fault_of_that_gpu_alone(driver, stub):
    stub.name(1, b"\xff\xfe")
    scan = await driver.scan()

    assert [UUIDS[0], UUIDS[2]] == [gpu.uuid for gpu in scan.gpus]
    (fault,) = scan.faults
    assert ("index 1", False) == (fault.gpu, fault.lost)
    assert "can't decode byte 0xff" in fault.text


async def test_an_event_of_any_wanted_kind_arrives_with_its_gpu(driver, stub):
    assert DriverEvent(EventKind.XID, UUIDS[2], 94) == await hears(driver, lambda: stub.xid(2, 94))
    kinds = {0x2: EventKind.ECC_DOUBLE, 0x80: EventKind.POWER_SOURCE, 0x100: EventKind.CHANGED}
    for gpu, (bit, kind) in enumerate(kinds.items()):
        assert DriverEvent(kind, UUIDS[gpu]) == await hears(driver, partial(stub.event, gpu, bit))
    await until(lambda: stub.sets == 0)


async def test_gpus_come_go_and_change_places_and_keep_their_uuids(driver, stub):
    orders = [[0, 1, 2], [0, 1, 2, 3], [3, 1, 0], [], [5]]
    seen = []
    for order in orders:
        stub.order(order)
        scan = await driver.scan()
        assert () == scan.faults
        assert list(range(len(order))) == [gpu.index for gpu in scan.gpus]
        seen.append([gpu.uuid for gpu in scan.gpus])

    assert [[UUIDS[slot] for slot in order] for order in orders] == seen
    assert ProbeOutcome.LOST is (await driver.probe(UUIDS[0])).outcome


async def test_a_gpu_that_is_added_while_we_listen_is_heard(driver, stub):
    events = listen(driver)
    async with contextlib.aclosing(events), asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        heard = tasks.create_task(events.__anext__())
        stub.order([0, 1, 2, 7])
        while not heard.done():
            await driver.scan()
            stub.xid(7, 48)
            await asyncio.wait([heard], timeout=0.02)

    assert DriverEvent(EventKind.XID, UUIDS[7], 48) == heard.result()


@pytest.mark.parametrize(
    "call", ["any", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo_v3"]
)
async def test_one_gpu_of_eight_that_hangs_leaves_the_loop_and_the_seven_alone(
    stub_path, stub, tmp_path, call
):
    driver = NvmlDriver(the_library(), path=stub_path, sys_root=tmp_path, deadline=PATIENT)
    stub.order(range(8))
    await driver.scan()
    stub.hang(call, 3)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    first = await driver.scan()
    second = await driver.scan()
    probes = [await driver.probe(uuid) for uuid in UUIDS[:8] if uuid != UUIDS[3]]
    spent = loop.time() - begun
    stub.hang(call, 3, hung=False)

    assert [7, 7] == [len(first.gpus), len(second.gpus)]
    assert {UUIDS[3]} == {fault.gpu for scan in (first, second) for fault in scan.faults}
    assert {ProbeOutcome.PASSED} == {probe.outcome for probe in probes}
    assert spent < 2 * PATIENT
    await driver.close()
