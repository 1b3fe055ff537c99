"""A node that would refuse every new pod offers nothing, to kubelet and scheduler, until mended."""

import asyncio
import contextlib
import errno
from pathlib import Path

import msgspec
import pytest

from agent.allocate.service import DISK_BUDGET
from agent.errors import DriverMissing, Refusal, RefusalReason, StateError
from agent.inventory import SPECIFICATIONS_DEADLINE
from agent.ledger import Ledger
from agent.model import Condition, slice_id
from tests.app.front_node import BEFORE, SETTINGS, FrontNode, FrontPlaces, joined, running, watched
from tests.builders import a_gpu, a_row, a_share, a_uuid
from tests.fakes.disk import GatedDisk
from tests.fakes.driver import ScriptedDriver
from tests.services.allocating import ids, placed
from tests.services.at_work import at_work

G0, G1, G2 = (a_uuid(number) for number in range(3))
LIBRARY = ("/usr/local/vgpu/libvgpu.so",)
WITHIN, BACK = 10.0, 1.0
READ_ONLY = StateError("hook path is read-only")
REPLACED = DriverMissing("replaced", remedy="reboot [P-DRIVER]")
PLAIN = "scheduler: none\n"
LIMITS = PLAIN + "plain: {memoryLimits: true}\n"
ROW = a_row(shares=(a_share(uuid=G1),), slice_ids=(slice_id(G1, 2),))


def of_gpus(count: int = 2) -> ScriptedDriver:
    return ScriptedDriver([a_gpu(index=number) for number in range(count)])


def offered(node: FrontNode) -> tuple[list[str], list[str]]:
    """The GPUs on offer in the kubelet's list, and in the annotation."""
    return list(node.served), [uuid for uuid, (_, well) in node.registered.items() if well]


def degraded(node: FrontNode) -> list[str]:
    """What readiness says beyond what it requires."""
    checks = watched(node.front).checks()
    return [one.name for one in checks if not (one.ok or one.required)]


def unload(preload: str, *, loadable: bool = True):
    def damage(host: "DamagedNode") -> None:
        host.places.hooks.preload, host.places.hooks.loadable = preload, loadable

    return damage


class DamagedNode:
    """A node of two GPUs, and what may befall it."""

    def __init__(self, plugins: Path) -> None:
        self.plugins = plugins
        self.driver = of_gpus()
        self.places = FrontPlaces()
        self.plugins.mkdir()
        self.mend()

    def mend(self) -> None:
        self.plugins.chmod(0o750)
        self.driver.replaced = None
        hooks = self.places.hooks
        hooks.missing, hooks.failure, hooks.loadable = (), None, True
        hooks.preload = "# HAMi-core\n/usr/lib/other.so:/usr/local/vgpu/libvgpu.so\n"


UNENFORCED = "no limit would be enforced"
DAMAGES = {
    "library": (lambda host: host.places.lose(*LIBRARY), "[HA-5005]"),
    "no preload": (unload(""), UNENFORCED),
    "another preload": (unload("/opt/vgpu/libvgpu.so\n"), UNENFORCED),
    "carriage return": (unload("/usr/local/vgpu/libvgpu.so\r\n"), UNENFORCED),
    "no library": (unload("/usr/local/vgpu/libvgpu.so\n", loadable=False), UNENFORCED),
    "directories": (lambda host: setattr(host.places.hooks, "failure", READ_ONLY), "[HA-5003]"),
    "open to all": (lambda host: host.plugins.chmod(0o777), "[P-KUBELET]"),
    "new driver": (lambda host: setattr(host.driver, "replaced", REPLACED), "[P-DRIVER]"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
async def test_what_would_refuse_every_pod_takes_all_slices_until_it_is_mended(
    tmp_path, damage, said
):
    host = DamagedNode(tmp_path / "plugins")
    front = joined(host.driver, places=host.places, plugins=str(host.plugins))
    async with running(front) as node:
        await asyncio.sleep(1)  # past the ticks of the start
        assert ([G0, G1], [G0, G1]) == offered(node)
        damage(host)
        await asyncio.sleep(WITHIN)

        assert ([], []) == offered(node)
        assert [G0, G1] == list(node.groups) == list(node.registered)
        assert (["offer"], ["NothingOffered"]) == (degraded(node), node.reasons)
        assert said in node.told[0].text
        host.mend()
        await asyncio.sleep(BACK)
        assert ([G0, G1], [G0, G1]) == offered(node)
        assert ([], ["NothingOffered", "SlicesOffered"]) == (degraded(node), node.reasons)


async def test_an_agent_that_starts_without_the_library_offers_nothing_from_the_first_list_on():
    places = FrontPlaces()
    places.hooks.missing = LIBRARY
    async with running(joined(of_gpus(), places=places)) as node:
        assert ([], []) == offered(node)
        assert 1 == node.front.facts.slices.value.generation


async def test_who_holds_a_slice_keeps_it_listed_and_healthy_gpus_stay_so_for_the_answers():
    places = FrontPlaces()
    holding = msgspec.structs.replace(BEFORE, ledger=Ledger((ROW,)))
    async with running(joined(of_gpus(), holding, places=places)) as node:
        before = {uuid: group.ids for uuid, group in node.groups.items()}
        places.lose(*LIBRARY)
        await asyncio.sleep(WITHIN)

        assert before == {uuid: group.ids for uuid, group in node.groups.items()}
        assert (ROW,) == node.front.state.ledger.value.rows
        assert node.shared(G1).serving


@pytest.mark.parametrize(
    ("settings", "is_written", "served"),
    [(PLAIN, True, [G0, G1]), (LIMITS, True, []), (PLAIN, False, [])],
)
async def test_plain_mode_withholds_for_its_state_and_for_a_library_that_it_mounts(
    settings, is_written, served
):
    places = FrontPlaces()
    places.hooks.missing, places.hooks.failure = LIBRARY, READ_ONLY
    async with running(joined(of_gpus(), settings=SETTINGS + settings, places=places)) as node:
        if not is_written:
            places.disk.faults.fail_at(0, errno.EROFS, times=1000)
            with pytest.raises(StateError):
                await node.front.state.commit(lambda ledger: ledger.put(ROW))
        await asyncio.sleep(WITHIN)

        assert served == node.served


# A GPU that a container runtime would not find by its CDI name is not on offer.


ALL = [G0, G1, G2]
SEEN = 5.2
HOLDING = msgspec.structs.replace(BEFORE, ledger=Ledger((ROW,)))


def names(*gpus: str) -> frozenset[str]:
    return frozenset(f"nvidia.com/gpu={gpu}" for gpu in gpus)


def places_of(*gpus: str) -> FrontPlaces:
    """A host whose specifications define these GPUs."""
    places = FrontPlaces()
    places.cdi.defined = names(*gpus)
    return places


def three(settings: str, places: FrontPlaces, state=BEFORE):
    return joined(
        of_gpus(3), state, settings=f"{SETTINGS}allocation: {{{settings}}}\n", places=places
    )


@pytest.mark.parametrize("strategy", ["cdi-cri", "[envvar, cdi-annotations]"])
async def test_of_three_gpus_the_one_that_nothing_defines_is_not_on_offer(strategy):
    async with running(three(f"deviceListStrategy: {strategy}", places_of(G0, G2))) as node:
        assert [G0, G2] == node.served
        assert ALL == list(node.groups), "its slices stay listed: the scheduler would keep it"
        assert {G0: (0, True), G1: (1, False), G2: (2, True)} == node.registered
        (event,) = node.told
        assert "GpuLeftOut" == event.reason
        assert f"({G1}) is not shared: no single CDI specification" in event.text
        assert "nvidia-ctk cdi generate" in event.text
        assert ["cdi"] == degraded(node)
        shared = node.shared(G1)
        assert (Condition.OK, True) == (shared.health.condition, shared.health.serving)
        assert "no single CDI specification" in shared.unavailable_reason


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


# A disk that stalls costs no pod and no slice; one that fails or is silent takes the slices.


class StallingNode:
    """A node that can answer; how many GPUs were on offer whenever its list changed."""

    def __init__(self, front, places):
        self.front, self.places, self.desk = front, places, front.desk()
        self.gates = {"state": places.disk.gate, "directory": places.hooks.gate}
        self.offers = []

    async def watch(self):
        async for listed in self.front.front.facts.slices.follow():
            self.offers.append(sum(group.healthy for group in listed.groups))


@contextlib.asynccontextmanager
async def stalling(*, shut=False):
    places = FrontPlaces(disk=GatedDisk(shut=shut))
    async with running(joined(of_gpus(), places=places)) as front:
        node = StallingNode(front, places)
        async with at_work(node.watch):
            yield node


@pytest.mark.parametrize("place", ["state", "directory"])
@pytest.mark.parametrize("seconds", [0.5, 5, 9])
async def test_a_stall_is_waited_for_and_takes_no_slice(place, seconds):
    async with stalling() as node:
        pod = node.desk.bind(placed(1))
        gate, loop = node.gates[place], asyncio.get_running_loop()
        gate.clear()
        loop.call_later(seconds, gate.set)
        began = loop.time()
        await node.desk.service.allocate(ids(0))

        assert seconds == pytest.approx(loop.time() - began, abs=0.1)
        assert [pod.uid] == [row.key.pod_uid for row in node.desk.ledger.rows]
        await asyncio.sleep(60)
        assert {2} == set(node.offers)
        assert [] == node.front.told


@pytest.mark.parametrize("place", ["state", "directory"])
async def test_a_silent_disk_takes_the_slices_with_the_refusal_and_they_are_back_with_its_answer(
    place,
):
    async with stalling() as node:
        node.desk.bind(placed(1))
        gate, loop = node.gates[place], asyncio.get_running_loop()
        gate.clear()
        began = loop.time()
        with pytest.raises(Refusal, match="has not answered"):
            await node.desk.service.allocate(ids(0))
        refused = loop.time() - began
        await asyncio.sleep(0.05)
        assert ([], []) == offered(node.front)
        await asyncio.sleep(1 + 30 * (place == "state"))
        assert ([], []) == offered(node.front)
        gate.set()
        await asyncio.sleep(1)

        assert DISK_BUDGET == pytest.approx(refused, abs=0.1)
        assert (2, 2) == tuple(map(len, offered(node.front)))
        assert ["NothingOffered", "SlicesOffered"] == node.front.reasons
        assert [2, 0, 2] == node.offers[-3:]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
async def test_an_error_of_the_disk_takes_the_slices_until_it_is_over(code):
    async with stalling() as node:
        node.desk.bind(placed(1))
        node.places.disk.faults.fail_at(0, code, times=1000)
        with pytest.raises(Refusal) as refused:
            await node.desk.service.allocate(ids(0))
        await asyncio.sleep(0.5)
        assert RefusalReason.STATE_UNWRITABLE is refused.value.gate
        assert ([], []) == offered(node.front)
        await asyncio.sleep(30)
        assert ([], []) == offered(node.front)
        node.places.disk.faults.revive()
        await asyncio.sleep(1.01)

        assert (2, 2) == tuple(map(len, offered(node.front)))


@pytest.mark.parametrize("ends", [0, 5])
@pytest.mark.parametrize("code", [0, errno.EACCES])
async def test_nothing_is_on_offer_before_the_first_write_of_the_state_has_come_back(code, ends):
    async with stalling(shut=True) as node:
        faults = node.places.disk.faults
        if code:
            faults.fail_at(0, code, times=1000)
        await asyncio.sleep(ends)
        assert [0] == node.offers, "that of a cell without a list"
        node.gates["state"].set()
        await asyncio.sleep(0.1)
        assert [0, 0 if code else 2] == node.offers
        faults.revive()
        await asyncio.sleep(1)
        assert ([0, 0, 2] if code else [0, 2]) == node.offers
