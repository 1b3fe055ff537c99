"""A node that would refuse every new pod offers nothing, to kubelet and scheduler, until mended."""

import asyncio
import errno

import msgspec
import pytest

from agent import inventory as withholding
from agent import state
from agent.allocate import service
from agent.allocate.match import UnlockedPods
from agent.allocate.service import DISK_BUDGET
from agent.cluster import NodeEvent
from agent.errors import DriverMissing, Refusal, RefusalReason, StateError
from agent.inventory import CHECK_PERIOD, SPECIFICATIONS_DEADLINE, SPECIFICATIONS_PERIOD
from agent.ledger import Ledger, State
from agent.model import Condition, slice_id
from agent.state import RETRY
from tests.app.front_node import BEFORE, SETTINGS, FrontNode, FrontPlaces, joined, running, watched
from tests.builders import a_gpu, a_health, a_row, a_share, a_uuid
from tests.fakes.disk import GatedDisk
from tests.fakes.driver import ScriptedDriver
from tests.services.allocation.allocating import Desk, ids, placed
from tests.services.at_work import at_work

G0, G1, G2 = (a_uuid(number) for number in range(3))
LIBRARY = ("/usr/local/vgpu/libvgpu.so",)
WITHIN = 1.0
BACK = 1.0
PLAIN = "scheduler: none\n"
LIMITS = PLAIN + "plain: {memoryLimits: true}\n"
ROW = a_row(shares=(a_share(uuid=G1),), slice_ids=(slice_id(G1, 2),))


def two_gpus() -> ScriptedDriver:
    return ScriptedDriver([a_gpu(index=number) for number in range(2)])


def offered(node: FrontNode) -> tuple[list[str], list[str]]:
    """The GPUs on offer in the kubelet's list, and in the annotation."""
    return list(node.served), [uuid for uuid, (_, well) in node.registered.items() if well]


def degraded(node: FrontNode) -> list[str]:
    """What readiness says beyond what it requires."""
    checks = watched(node.front).checks()
    return [one.name for one in checks if not (one.ok or one.required)]


async def test_a_library_that_vanishes_takes_every_slice_off_the_list_and_out_of_the_annotation():
    places = FrontPlaces()
    async with running(joined(two_gpus(), places=places)) as node:
        assert ([G0, G1], [G0, G1]) == offered(node)
        places.lose(*LIBRARY)
        await asyncio.sleep(WITHIN)

        assert ([], []) == offered(node)
        assert [G0, G1] == list(node.groups) == list(node.registered)
        assert ["offer"] == degraded(node)
        assert ["NothingOffered"] == node.reasons
        assert "[HA-5005]" in node.told[0].text
        places.hooks.missing = ()
        await asyncio.sleep(BACK)
        assert ([G0, G1], [G0, G1]) == offered(node)
        assert [] == degraded(node)
        assert ["NothingOffered", "SlicesOffered"] == node.reasons


@pytest.mark.parametrize(
    ("preload", "loadable"),
    [
        ("", True),
        ("/opt/vgpu/libvgpu.so\n", True),
        ("/usr/local/vgpu/libvgpu.so\r\n", True),
        ("/usr/local/vgpu/libvgpu.so\n", False),
    ],
)
async def test_a_library_that_no_container_would_load_takes_every_slice(preload, loadable):
    places = FrontPlaces()
    places.hooks.preload = "# HAMi-core\n/usr/lib/other.so:/usr/local/vgpu/libvgpu.so\n"
    async with running(joined(two_gpus(), places=places)) as node:
        assert ([G0, G1], [G0, G1]) == offered(node)
        before, places.hooks.preload = places.hooks.preload, preload
        places.hooks.loadable = loadable
        await asyncio.sleep(WITHIN)

        assert ([], []) == offered(node)
        assert ["NothingOffered"] == node.reasons
        assert "no limit would be enforced" in node.told[0].text
        assert "[HA-5005]" in node.told[0].text
        places.hooks.preload, places.hooks.loadable = before, True
        await asyncio.sleep(BACK)
        assert ([G0, G1], [G0, G1]) == offered(node)


async def test_an_agent_that_starts_without_the_library_offers_nothing_from_the_first_list_on():
    places = FrontPlaces()
    places.hooks.missing = LIBRARY
    async with running(joined(two_gpus(), places=places)) as node:
        assert ([], []) == offered(node)
        assert 1 == node.front.facts.slices.value.generation


async def test_a_state_that_could_not_be_written_takes_the_slices_until_a_write_succeeds():
    places = FrontPlaces()
    async with running(joined(two_gpus(), places=places)) as node:
        places.disk.faults.fail_at(0, errno.ENOSPC, times=1000)
        with pytest.raises(StateError):
            await node.front.state.commit(lambda ledger: ledger.put(ROW))
        await asyncio.sleep(WITHIN)
        assert ([], []) == offered(node)
        assert "[HA-5001]" in node.told[0].text
        places.disk.faults.revive()
        await asyncio.sleep(RETRY + BACK)

        assert ([G0, G1], [G0, G1]) == offered(node)


async def test_directories_that_cannot_be_made_take_the_slices():
    places = FrontPlaces()
    places.hooks.failure = StateError("hook path is read-only")
    async with running(joined(two_gpus(), places=places)) as node:
        await asyncio.sleep(WITHIN)

        assert ([], []) == offered(node)
        assert "[HA-5003]" in node.told[0].text


async def test_a_kubelets_directory_that_everybody_may_write_takes_the_slices(tmp_path):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins").chmod(0o777)
    front = joined(two_gpus(), plugins=str(tmp_path / "plugins"))
    async with running(front) as node:
        await asyncio.sleep(WITHIN)
        assert ([], []) == offered(node)
        assert "[P-KUBELET]" in node.told[0].text
        (tmp_path / "plugins").chmod(0o750)
        await asyncio.sleep(BACK)

        assert ([G0, G1], [G0, G1]) == offered(node)


async def test_a_driver_that_was_replaced_takes_the_slices_until_its_module_follows():
    driver = two_gpus()
    async with running(joined(driver)) as node:
        assert ([G0, G1], [G0, G1]) == offered(node)
        driver.replaced = DriverMissing("replaced", remedy="reboot [P-DRIVER]")
        await asyncio.sleep(CHECK_PERIOD)

        assert ([], []) == offered(node)
        assert "[P-DRIVER]" in node.told[0].text
        driver.replaced = None
        await asyncio.sleep(BACK)
        assert ([G0, G1], [G0, G1]) == offered(node)


async def test_who_holds_a_slice_keeps_it_listed_and_healthy_gpus_stay_so_for_the_answers():
    places = FrontPlaces()
    holding = msgspec.structs.replace(BEFORE, ledger=Ledger((ROW,)))
    async with running(joined(two_gpus(), holding, places=places)) as node:
        before = {uuid: group.ids for uuid, group in node.groups.items()}
        places.lose(*LIBRARY)
        await asyncio.sleep(WITHIN)

        assert before == {uuid: group.ids for uuid, group in node.groups.items()}
        assert (ROW,) == node.front.state.ledger.value.rows
        assert node.shared(G1).serving


async def test_plain_mode_withholds_for_the_library_only_where_it_mounts_it():
    for settings, expected in ((PLAIN, [G0, G1]), (LIMITS, [])):
        places = FrontPlaces()
        places.hooks.missing = LIBRARY
        places.hooks.failure = StateError("hook path is read-only")
        async with running(joined(two_gpus(), settings=SETTINGS + settings, places=places)) as node:
            await asyncio.sleep(WITHIN)

            assert expected == node.served


async def test_plain_mode_withholds_for_its_state_too():
    places = FrontPlaces()
    async with running(joined(two_gpus(), settings=SETTINGS + PLAIN, places=places)) as node:
        places.disk.faults.fail_at(0, errno.EROFS, times=1000)
        with pytest.raises(StateError):
            await node.front.state.commit(lambda ledger: ledger.put(ROW))
        await asyncio.sleep(WITHIN)

        assert [] == node.served


# A GPU that a container runtime would not find by its CDI name is not on offer.


ALL = [G0, G1, G2]
SEEN = SPECIFICATIONS_PERIOD + 0.2
HOLDING = msgspec.structs.replace(BEFORE, ledger=Ledger((ROW,)))


def names(*gpus: str, kind: str = "nvidia.com/gpu") -> frozenset[str]:
    return frozenset(f"{kind}={gpu}" for gpu in gpus)


def places_of(*gpus: str) -> FrontPlaces:
    """A host whose specifications define these GPUs."""
    places = FrontPlaces()
    places.cdi.defined = names(*gpus)
    return places


def three(settings: str, places: FrontPlaces, state=BEFORE):
    driver = ScriptedDriver([a_gpu(index=number) for number in range(3)])
    return joined(driver, state, settings=f"{SETTINGS}allocation: {{{settings}}}\n", places=places)


def left_out(node: FrontNode) -> list[NodeEvent]:
    return [event for event in node.told if event.reason == "GpuLeftOut"]


@pytest.mark.parametrize(
    "strategy", ["cdi-cri", "cdi-annotations", "[envvar, cdi-cri]", "[cdi-annotations, cdi-cri]"]
)
async def test_of_three_gpus_the_one_that_nothing_defines_is_not_on_offer(strategy):
    async with running(three(f"deviceListStrategy: {strategy}", places_of(G0, G2))) as node:
        assert [G0, G2] == node.served
        assert ALL == list(node.groups), "its slices stay listed: the scheduler would keep it"
        assert {G0: (0, True), G1: (1, False), G2: (2, True)} == node.registered
        (event,) = left_out(node)
        assert f"GPU {G1} is not shared: no single CDI specification" in event.text
        assert "nvidia-ctk cdi generate" in event.text
        assert ["cdi"] == degraded(node)


async def test_what_is_said_of_its_health_is_true():
    async with running(three("deviceListStrategy: cdi-cri", places_of())) as node:
        await asyncio.sleep(60)

        assert [] == node.served
        for uuid in ALL:
            shared = node.shared(uuid)
            assert (Condition.OK, True) == (shared.health.condition, shared.health.serving)
            assert "no single CDI specification" in shared.unavailable_reason
        assert ["GpuLeftOut"] * 3 == node.reasons


async def test_the_first_list_waits_for_the_specifications():
    """So that no slice is on offer for a moment that no container could use."""
    places = places_of(G1)
    places.cdi.slow = 0.5
    front = three("deviceListStrategy: cdi-cri", places)
    lists = []

    async def follow() -> None:
        async for listed in front.facts.slices.follow():
            lists.extend([[group.uuid for group in listed.groups if group.healthy]])

    async with at_work(follow), running(front):
        await asyncio.sleep(30)

    assert [[], [G1]] == lists, "the first is that of a cell without a list"


async def test_a_gpu_is_on_offer_soon_after_it_is_defined_and_no_longer_when_it_is_not():
    places = places_of()
    async with running(three("deviceListStrategy: cdi-annotations", places)) as node:
        for defined in ((G0,), (G0, G1), (G1,), (), ALL):
            places.cdi.defined = names(*defined)
            await asyncio.sleep(SEEN)

            assert list(defined) == node.served
        assert [] == degraded(node)


@pytest.mark.parametrize("strategy", ["envvar", "volume-mounts", "[envvar, volume-mounts]"])
async def test_without_a_cdi_strategy_nobody_looks(strategy):
    places = places_of()
    async with running(three(f"deviceListStrategy: {strategy}", places)) as node:
        await asyncio.sleep(60)

        assert ALL == node.served
        assert [] == places.cdi.asked


async def test_the_kind_and_the_directories_of_the_settings_count():
    places = places_of()
    places.cdi.defined = names(G1, kind="example.com/vgpu")
    settings = "deviceListStrategy: cdi-cri, cdiKind: example.com/vgpu, cdiSpecDirs: [/a, /b]"
    async with running(three(settings, places)) as node:
        assert [G1] == node.served
        assert {("/a", "/b")} == set(places.cdi.asked)


async def test_a_feature_whose_name_is_not_defined_takes_all():
    places = places_of(*ALL)
    async with running(three("deviceListStrategy: cdi-cri, gds: true", places)) as node:
        assert [] == node.served
        places.cdi.defined = names(*ALL) | {"nvidia.com/gds=all"}
        await asyncio.sleep(SEEN)

        assert ALL == node.served


@pytest.mark.parametrize("how", ["unreadable", "hanging"])
async def test_directories_that_cannot_be_read_say_nothing(how):
    places = places_of()
    if how == "unreadable":
        places.cdi.defined = None
    places.cdi.hanging = how == "hanging"
    async with running(three("deviceListStrategy: cdi-cri", places)) as node:
        await asyncio.sleep(SPECIFICATIONS_DEADLINE)
        assert ALL == node.served
        places.cdi.hanging = False
        places.cdi.defined = names(G0)
        await asyncio.sleep(2 * SEEN)

        assert [G0] == node.served


async def test_while_they_are_read_again_what_was_read_before_counts():
    places = places_of(G0)
    async with running(three("deviceListStrategy: cdi-cri", places)) as node:
        places.cdi.hanging = True
        places.cdi.was_asked.clear()
        await places.cdi.was_asked.wait()
        await node.front.state.commit(lambda ledger: ledger.put(ROW))
        await asyncio.sleep(0.1)

        assert [G0] == node.served


async def test_a_change_of_the_strategy_is_obeyed_at_once():
    places = places_of(G0)
    async with running(three("deviceListStrategy: envvar", places)) as node:
        edits = node.front.facts.edits
        assert ALL == node.served
        for strategies, served in ((("cdi-cri",), [G0]), (("envvar",), ALL)):
            edits.set(msgspec.structs.replace(edits.value, device_list_strategies=strategies))
            await asyncio.sleep(0.1)

            assert served == node.served


async def test_who_holds_a_slice_of_it_keeps_it_and_is_told_nothing():
    places = places_of(*ALL)
    async with running(three("deviceListStrategy: cdi-cri", places, HOLDING)) as node:
        before = node.groups[G1].ids
        places.cdi.defined = names(G0, G2)
        await asyncio.sleep(SEEN)

        assert [G0, G2] == node.served
        assert before == node.groups[G1].ids
        assert (ROW,) == node.front.state.ledger.value.rows
        assert ["GpuLeftOut"] == node.reasons
        places.cdi.defined = names(*ALL)
        await asyncio.sleep(SEEN)
        assert ["GpuLeftOut", "GpuInventoryChanged"] == node.reasons
        assert f"shared now: GPU 1 ({G1})" == node.told[-1].text


async def test_a_bad_gpu_that_is_also_undefined_is_called_bad():
    driver = ScriptedDriver([a_gpu(index=0)])
    ill = a_health(condition=Condition.BAD, text="XID 48")
    state = msgspec.structs.replace(BEFORE, health={G0: ill})
    settings = f"{SETTINGS}allocation: {{deviceListStrategy: cdi-cri}}\n"
    async with running(joined(driver, state, settings=settings, places=places_of())) as node:
        assert [] == node.served
        assert "is bad" in node.shared(G0).unavailable_reason


async def test_a_gpu_that_the_settings_leave_out_is_not_missed():
    settings = f"deviceListStrategy: cdi-cri}}\nsharing: {{filterUUIDs: [{G1}]"
    async with running(three(settings, places_of(G0, G2))) as node:
        assert [G0, G2] == node.served == list(node.groups)
        assert [] == node.reasons == degraded(node)


# A disk that stalls costs no pod and no slice; one that fails or is silent takes the slices.


class StallingNode:
    """A node that can answer, beside what decides whether it offers slices."""

    def __init__(self):
        self.disk = GatedDisk()
        self.places = FrontPlaces(disk=self.disk)
        self.front = joined(two_gpus(), places=self.places)
        hooks = self.places.hooks
        self.desk = Desk(State(), self.disk, UnlockedPods.STRICT, self.front, hooks)
        self.changes = []
        """When the kubelet's list changed, and how many GPUs were on offer."""

    async def watch(self):
        async for _ in self.front.facts.slices.follow():
            groups = self.front.facts.slices.value.groups
            now = asyncio.get_running_loop().time()
            self.changes.append((now, sum(group.healthy for group in groups)))

    @property
    def gates(self):
        return {"state": self.disk.gate, "directory": self.places.hooks.gate}


async def stalled(place, seconds):
    """A disk that stalls: the pod waits for it, and nothing else happens."""
    node = StallingNode()
    async with running(node.front) as front, at_work(node.watch):
        pod = node.desk.bind(placed(1))
        gate, loop = node.gates[place], asyncio.get_running_loop()
        gate.clear()
        loop.call_later(seconds, gate.set)
        began = loop.time()
        await node.desk.service.allocate(ids(0))

        assert seconds == pytest.approx(loop.time() - began, abs=0.1)
        assert [pod.uid] == [row.key.pod_uid for row in node.desk.ledger.rows]
        await asyncio.sleep(60)
        assert {2} == {count for _, count in node.changes}
        assert [] == front.told


async def silent(place):
    """A disk that does not answer, until it does: refusal and slices go together."""
    node = StallingNode()
    async with running(node.front) as front, at_work(node.watch):
        node.desk.bind(placed(1))
        gate, loop = node.gates[place], asyncio.get_running_loop()
        gate.clear()
        began = loop.time()
        with pytest.raises(Refusal, match="has not answered"):
            await node.desk.service.allocate(ids(0))
        refused = loop.time() - began
        await asyncio.sleep(0.05)
        assert ([], []) == offered(front)
        await asyncio.sleep(1 + 30 * (place == "state"))
        assert ([], []) == offered(front)
        gate.set()
        await asyncio.sleep(1)

        assert DISK_BUDGET == pytest.approx(refused, abs=0.1)
        assert (2, 2) == tuple(map(len, offered(front)))
        assert ["NothingOffered", "SlicesOffered"] == front.reasons
        assert [2, 0, 2] == [count for _, count in node.changes][-3:]


@pytest.mark.parametrize("place", ["state", "directory"])
@pytest.mark.parametrize("seconds", [0.5, 1, 5, 9])
async def test_a_stall_is_waited_for_and_takes_no_slice(place, seconds):
    await stalled(place, seconds)


@pytest.mark.parametrize("place", ["state", "directory"])
async def test_a_silent_disk_takes_the_slices_with_the_refusal_and_they_are_back_with_its_answer(
    place,
):
    await silent(place)


@pytest.mark.parametrize(
    ("module", "name", "seconds"),
    [(state, "COMMIT_DEADLINE", 1.0), (service, "DISK_BUDGET", 0.8)],
    ids=["silent after a second", "an Allocate has no time for the disk"],
)
async def test_a_planted_bug_that_gives_up_a_stalling_disk_is_found(
    module, name, seconds, monkeypatch
):
    monkeypatch.setattr(module, name, seconds)
    with pytest.raises((AssertionError, ExceptionGroup)):
        await stalled("state", 5)


@pytest.mark.parametrize(
    ("place", "module", "name", "value"),
    [
        ("state", withholding, "LEAST", 5.0),
        ("directory", withholding.Withholder, "refused", lambda self, _: self.look()),
        ("directory", withholding.Withholder, "refused", lambda *_: None),
    ],
    ids=["back late", "the slices go later than the refusal", "the slices stay"],
)
async def test_a_planted_bug_that_parts_the_slices_from_the_refusal_is_found(
    place, module, name, value, monkeypatch
):
    monkeypatch.setattr(module, name, value)
    with pytest.raises((AssertionError, ExceptionGroup)):
        await silent(place)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
async def test_an_error_of_the_disk_takes_the_slices_until_it_is_over(code):
    node = StallingNode()
    async with running(node.front) as front:
        node.desk.bind(placed(1))
        node.places.disk.faults.fail_at(0, code, times=1000)
        with pytest.raises(Refusal) as refused:
            await node.desk.service.allocate(ids(0))
        await asyncio.sleep(0.5)
        assert RefusalReason.STATE_UNWRITABLE is refused.value.gate
        assert ([], []) == offered(front)
        await asyncio.sleep(30)
        assert ([], []) == offered(front)
        node.places.disk.faults.revive()
        await asyncio.sleep(1.01)

        assert (2, 2) == tuple(map(len, offered(front)))


async def test_a_slow_disk_that_always_answers_never_takes_a_slice():
    node = StallingNode()
    async with running(node.front), at_work(node.watch):
        loop, gate = asyncio.get_running_loop(), node.gates["state"]
        for number in range(20):
            pod = node.desk.bind(placed(number))
            gate.clear()
            loop.call_later(4, gate.set)
            await node.desk.service.allocate(ids(0))
            node.desk.witness.admit(pod, main=ids(0)[0])
            node.desk.bury(pod)

        assert {2} == {count for _, count in node.changes}
