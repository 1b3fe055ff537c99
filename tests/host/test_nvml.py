"""The driver by NVML: what it tells of GPUs, its sessions, and GPUs that are released.

One GPU's silence or failure is never another's, nor is its index.
"""

import asyncio
import itertools
from pathlib import Path

import pytest

from agent.errors import DriverError, DriverMissing, GpuError
from agent.gpu.driver import NvmlDriver
from agent.gpu.nvml import bus_id, numa_node
from agent.model import (
    FabricState,
    GpuFault,
    GpuSample,
    GpuSigns,
    GpuUuid,
    PciPath,
    ProbeOutcome,
    RecoveryAction,
    Trouble,
)
from tests.fakes import nvml_stub
from tests.fakes.nvml_stub import ANY, until

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

G0, G1, G2 = UUIDS = [GpuUuid(f"GPU-5708-{slot}") for slot in range(3)]
LOST, RESET, ENDED = 15, 16, 1
LOST_1 = GpuFault(G1, "GPU is lost", Trouble.LOST, 1)
MEMORY, INIT = "nvmlDeviceGetMemoryInfo", "nvmlInitWithFlags"
HANDLE, COUNT = "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetCount_v2"
FACTS = ["UUID", "Name", "MemoryInfo", "PciInfo_v3", "MinorNumber", "MigMode"]


async def shared(driver) -> list[GpuUuid]:
    """The GPUs that a scan describes."""
    return [gpu.uuid for gpu in (await driver.scan()).gpus]


def is_back(driver, stub) -> bool:
    """No call hangs, and the driver has heard so: it could not end its session before."""
    return stub.inside == 0 and not driver._threads._calls


def put_numa(sys_root: Path, bus: str, text: str) -> None:
    folder = sys_root / "bus/pci/devices" / bus
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(text)


async def test_a_scan_describes_every_gpu(driver, stub, tmp_path):
    put_numa(tmp_path, "0000:b0:00.0", "1\n")
    stub.set(0, nvlinks=4, bridged=2)
    stub.set(1, nvlinks=4, bridged=1)
    stub.set(2, mig=1)
    scan = await driver.scan()

    assert ("999.1", ()) == (scan.driver_version, scan.faults)
    assert [
        (G0, 0, 0, 16384, "0000:af:00.0", None, False),
        (G1, 1, 1, 16384, "0000:b0:00.0", 1, False),
        (G2, 2, 2, None, "0000:b1:00.0", None, True),
    ] == [(g.uuid, g.index, g.minor, g.memory_mib, g.pci, g.numa, g.mig_enabled) for g in scan.gpus]
    assert [[4, 0], [4, 0], [0, 0]] == [[link.nvlinks for link in g.links] for g in scan.gpus]
    assert {PciPath.SAME_CPU} == {link.path for gpu in scan.gpus for link in gpu.links}


@pytest.mark.parametrize("text", ["-1", "none", ""])
def test_a_numa_node_that_the_kernel_does_not_tell_is_unknown(tmp_path, text):
    put_numa(tmp_path, "0000:1b:00.0", text)

    assert numa_node(tmp_path, "0000:1b:00.0") is None


def test_a_bus_id_is_written_as_sysfs_writes_it():
    given = "00000000:1B:00.0 00000001:AF:00.0 0000:3B:00.0 00010000:01:00.0 unknown"
    sysfs = "0000:1b:00.0 0001:af:00.0 0000:3b:00.0 10000:01:00.0 unknown"

    assert sysfs.split() == list(map(bus_id, given.split()))


@pytest.mark.parametrize(
    ("call", "code", "told"),
    [
        (MEMORY, 3, {"memory_mib": None}),
        ("nvmlDeviceGetMinorNumber", 3, {"minor": None}),
        ("nvmlDeviceGetMigMode", 3, {"mig_enabled": False}),
        *((f"nvmlDeviceGet{name}", LOST, LOST_1) for name in ("HandleByIndex_v2", *FACTS)),
    ],
)
async def test_a_gpu_without_a_fact_is_described_and_one_that_fails_is_a_fault_alone(
    driver, stub, call, code, told
):
    await driver.scan()
    stub.fail(call, 1, code=code)
    scan = await driver.scan()

    if told is LOST_1:
        assert ([G0, G2], (LOST_1,)) == ([gpu.uuid for gpu in scan.gpus], scan.faults)
    else:
        assert (told, ()) == ({name: getattr(scan.gpus[1], name) for name in told}, scan.faults)


async def test_a_fault_at_an_index_names_its_owner_only_if_he_was_described_and_has_not_moved(
    driver, stub
):
    stub.fail("nvmlDeviceGetUUID", 2, code=999)
    assert (GpuFault("index 2", "Unknown Error", index=2),) == (await driver.scan()).faults
    stub.succeed()
    await driver.scan()
    stub.order([2, 0])
    stub.lose(0)
    scan = await driver.scan()

    assert [G2] == [gpu.uuid for gpu in scan.gpus]
    assert [("index 1", True)] == [(fault.gpu, fault.lost) for fault in scan.faults]


@pytest.mark.parametrize(
    ("level", "path"),
    [(0, PciPath.SAME_BOARD), (10, PciPath.SINGLE_SWITCH), (30, PciPath.HOST_BRIDGE), (7, None)],
)
async def test_the_path_between_two_gpus_is_the_librarys_level(stub, driver, level, path):
    stub.set(0, level=level)

    assert [path, path] == [link.path for link in (await driver.scan()).gpus[0].links]


# Probes and samples.


@pytest.mark.parametrize(
    ("call", "code", "outcome"),
    [
        (MEMORY, LOST, ProbeOutcome.LOST),
        (HANDLE, 28, ProbeOutcome.LOST),
        (MEMORY, 999, ProbeOutcome.FAILED),
        (MEMORY, RESET, ProbeOutcome.REFUSED),
        (MEMORY, 3, ProbeOutcome.PASSED),
    ],
)
async def test_a_probe_says_how_the_gpu_answers(driver, stub, call, code, outcome):
    stub.fail(call, 1, code=code)
    probes = [await driver.probe(uuid) for uuid in (G0, G1)]

    assert [ProbeOutcome.PASSED, outcome] == [probe.outcome for probe in probes]


SIDE_QUESTIONS = {
    "nvmlDeviceGetRemappedRows": {"rows_pending", "rows_failed"},
    "nvmlDeviceGetRetiredPagesPendingStatus": {"pages_pending"},
    "nvmlDeviceGetFieldValues": {"recovery"},
}
GONE = {LOST: ProbeOutcome.LOST, RESET: ProbeOutcome.REFUSED}


@pytest.mark.parametrize("code", [2, 3, 4, 13, 999, *GONE])
@pytest.mark.parametrize("call", SIDE_QUESTIONS)
async def test_a_side_question_fails_a_probe_only_if_the_gpu_is_gone(driver, stub, call, code):
    stub.fail(call, 0, code=code)
    probe = await driver.probe(G0)

    assert GONE.get(code, ProbeOutcome.PASSED) is probe.outcome
    if code not in GONE:
        names = itertools.chain(*SIDE_QUESTIONS.values())
        assert SIDE_QUESTIONS[call] == {n for n in names if getattr(probe.signs, n) is None}


ACTIONS = "NONE GPU_RESET NODE_REBOOT DRAIN_P2P DRAIN_AND_RESET"
FABRICS = (None, FabricState.NOT_STARTED, FabricState.IN_PROGRESS, FabricState.COMPLETED)


@pytest.mark.parametrize(
    ("given", "name", "sign"),
    [
        *(({"recovery": n}, "recovery", RecoveryAction[a]) for n, a in enumerate(ACTIONS.split())),
        ({"recovery": 7}, "recovery", RecoveryAction.SYSTEM_REBOOT),
        ({"recovery": 99}, "recovery", RecoveryAction.OTHER),
        ({"recovery": -1}, "recovery", None),
        *(({"fabric": n}, "fabric", state) for n, state in enumerate(FABRICS)),
        ({"fabric": 3, "fabric_status": 999}, "fabric", FabricState.FAILED),
    ],
)
async def test_a_sign_is_what_the_driver_says(driver, stub, given, name, sign):
    stub.set(1, **given)

    assert sign is getattr((await driver.probe(G1)).signs, name)


async def test_signs_and_use_come_through_the_librarys_structures(driver, stub):
    stub.set(1, rows_pending=1, pages_pending=1, recovery=4)
    stub.set(0, gpu_percent=93, memory_percent=41, used=7 << 30, reserved=616 << 20)
    stub.set(0, celsius=41, milliwatts=70_150, ecc_life_corrected=9, ecc_life_uncorrected=-1)
    action = RecoveryAction.DRAIN_AND_RESET
    signs = GpuSigns(rows_pending=True, rows_failed=False, pages_pending=True, recovery=action)

    assert signs == (await driver.probe(G1)).signs
    assert GpuSample(G0, 93, 41, 7168, 616, 41, 70_150, 9, None) == await driver.sample(G0)


async def test_calls_that_an_old_driver_lacks_cost_nothing(tmp_path):
    library = nvml_stub.build(tmp_path, "-DOLD_DRIVER")
    driver = NvmlDriver(path=library, sys_root=tmp_path)
    scan, probe = await driver.scan(), await driver.probe(G0)
    nvml_stub.NvmlStub(library).set(0, used=3 << 30, reserved=1 << 30)
    sample = await driver.sample(G0)

    assert (4096, 0) == (sample.used_mib, sample.reserved_mib)
    assert [0, 0] == [link.nvlinks for link in scan.gpus[0].links]
    assert ProbeOutcome.PASSED is probe.outcome
    assert (None, None) == (probe.signs.rows_failed, probe.signs.recovery)
    await driver.close()


async def test_a_gpu_that_does_not_answer_is_named_and_the_other_answers(driver, stub):
    stub.hang(ANY, 0)
    with pytest.raises(GpuError, match="GPU GPU-5708-0: no answer in time") as caught:
        await driver.sample(G0)
    assert not caught.value.lost
    with pytest.raises(GpuError, match="an earlier call about GPU-5708-0 has not returned"):
        await driver.sample(G0)
    probe = await driver.probe(G0)

    assert (ProbeOutcome.SILENT, True) == (probe.outcome, "has not returned" in probe.text)
    assert ProbeOutcome.PASSED is (await driver.probe(G1)).outcome
    assert (await driver.sample(G1)) is not None


# The session: what is missing is said, what broke is begun anew, close ends it.


@pytest.mark.parametrize(
    ("call", "code", "kind", "words"),
    [
        (INIT, 12, DriverMissing, "libnvidia-ml.so.1 is not found: install the NVIDIA driver"),
        (INIT, 9, DriverMissing, "the NVIDIA kernel module is not loaded"),
        (INIT, 18, DriverMissing, "differ in version"),
        (INIT, 4, DriverMissing, "/dev/nvidiactl cannot be opened"),
        (COUNT, 999, DriverError, "answers with an error: Unknown Error"),
    ],
)
async def test_what_ails_the_whole_driver_is_said(driver, stub, call, code, kind, words):
    stub.fail(call, code=code)
    with pytest.raises(kind, match=words):
        await driver.scan()

    stub.succeed()
    assert UUIDS == await shared(driver)


async def test_close_leaves_a_driver_that_hangs_in_each_step(
    stub, stub_path, tmp_path, monkeypatch
):
    monkeypatch.setattr("agent.gpu.driver.CLOSE_DEADLINE", 0.2)
    driver = NvmlDriver(path=stub_path, sys_root=tmp_path, deadline=30)
    await driver.scan()
    stub.hang(COUNT)
    stub.hang("nvmlShutdown")
    async with asyncio.TaskGroup() as tasks:
        scan = tasks.create_task(driver.scan())
        await until(lambda: stub.inside == 1)
        await driver.close()
        stub.release()
        scan.cancel()

    assert 0 == stub.calls("nvmlShutdown")


@pytest.mark.parametrize("deadline", [0.3, 30])
async def test_no_session_is_ended_around_a_call_that_is_inside_and_none_begun_while_it_is_awaited(
    driver, stub, deadline
):
    await driver.scan()
    stub.hang(ANY, 0)
    async with asyncio.TaskGroup() as tasks:
        inside = tasks.create_task(driver.probe(G0))
        await until(lambda: stub.inside == 1)
        if is_given_up := deadline < 1:
            assert ProbeOutcome.SILENT is (await inside).outcome
        stub.fail(COUNT, code=ENDED)
        with pytest.raises(DriverError, match="session"):
            await driver.scan()
        stub.succeed()
        scan = tasks.create_task(shared(driver))
        await asyncio.wait([scan], timeout=None if is_given_up else 0.3)
        assert (0, 1 + is_given_up) == (stub.calls("nvmlShutdown"), stub.calls(INIT))
        stub.release()
        assert UUIDS[is_given_up:] == await scan
        assert (1 + is_given_up, 2) == (stub.sessions, stub.calls(INIT))
    await until(lambda: is_back(driver, stub))
    await driver.close()
    assert 0 == stub.sessions


async def test_a_driver_that_begins_slowly_is_open_although_nobody_waits_so_long(driver, stub):
    stub.hang(INIT)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await driver.scan()
    assert 1 == stub.calls(INIT)
    stub.release()

    await until(lambda: stub.sessions == 1)
    assert UUIDS == await shared(driver)
    assert (1, 0) == (stub.calls(INIT), stub.calls("nvmlShutdown"))


# A GPU that is released is held by no handle, whatever is asked of the others.


def attached(stub) -> list[bool]:
    return [stub.attached(slot) for slot in range(3)]


async def test_a_released_gpu_is_let_go_of_and_the_others_are_asked_on(driver, stub):
    before = await driver.scan()
    assert [True] * 3 == attached(stub)
    await driver.release([G1])
    assert [False] * 3 == attached(stub)
    scan = await driver.scan()
    probes = [await driver.probe(uuid) for uuid in (G0, G2)]
    await driver.sample(G0)
    for ask in (driver.probe, driver.sample):
        with pytest.raises(GpuError, match="hami-agent recheck takes it back"):
            await ask(G1)

    assert [before.gpus[0], before.gpus[2]] == list(scan.gpus)  # links and indexes, too
    assert [(G1, Trouble.RELEASED, 1)] == [(f.gpu, f.trouble, f.index) for f in scan.faults]
    assert {ProbeOutcome.PASSED} == {probe.outcome for probe in probes}
    assert [True, False, True] == attached(stub)


@pytest.mark.parametrize("everything", [False, True])
async def test_with_all_released_no_session_is_open_and_none_is_begun(driver, stub, everything):
    """`everything`: also what nobody shares, such as a GPU in MIG mode or one filtered out."""
    await driver.scan()
    await driver.release([G0, G2] if everything else UUIDS, everything=everything)
    begun = stub.calls(INIT)
    for ask in (driver.scan(), driver.probe(G0), anext(driver.events())):
        with pytest.raises(DriverError, match="all GPUs are released"):
            await ask
    assert ([False] * 3, 0) == (attached(stub), stub.sessions)
    driver.take_back(G0)

    left = [G1] * everything
    assert [G0, *left] == await shared(driver)
    assert ([True, everything, False], 1) == (attached(stub), stub.calls(INIT) - begun)
    driver.take_back(G2)
    assert [G0, *left, G2] == await shared(driver)


@pytest.mark.parametrize("trouble", ["no end", "a call inside"])
async def test_a_session_that_cannot_be_ended_is_told_to_who_releases_a_gpu(driver, stub, trouble):
    await driver.scan()
    if trouble == "no end":
        stub.fail("nvmlShutdown", code=999)
        words = "does not end the session, which holds all GPUs"
    else:
        stub.hang(slot=0)
        await driver.probe(G0)
        words = "has not returned from the driver"
    with pytest.raises(DriverError, match=words):
        await driver.release([G1])
    stub.succeed()
    stub.release()
    await until(lambda: is_back(driver, stub))
    assert ProbeOutcome.PASSED is (await driver.probe(G2)).outcome
    await driver.release([G1])

    assert ([False] * 3, 0) == (attached(stub), stub.sessions)


async def test_all_are_let_go_of_although_one_of_them_was_never_described(driver, stub):
    stub.hang(slot=1)
    await driver.scan()
    stub.hang(slot=1, hung=False)
    await until(lambda: is_back(driver, stub))
    with pytest.raises(GpuError, match=r"has not described it.*release all"):
        await driver.release([G1])
    await driver.release(UUIDS, everything=True)

    assert ([False] * 3, 0) == (attached(stub), stub.sessions)
    with pytest.raises(DriverError, match="all GPUs are released"):
        await driver.scan()
    for uuid in UUIDS:
        driver.take_back(uuid)
    assert UUIDS == await shared(driver)
