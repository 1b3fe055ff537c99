"""A node that would refuse every new pod offers nothing, to kubelet and scheduler, until mended."""

import asyncio
import errno

import msgspec
import pytest

from agent.errors import DriverMissing, StateError
from agent.inventory import CHECK_PERIOD
from agent.ledger import Ledger
from agent.model import slice_id
from agent.state import RETRY
from tests.app.front_node import BEFORE, SETTINGS, FrontNode, FrontPlaces, joined, running, watched
from tests.builders import a_gpu, a_row, a_share, a_uuid
from tests.fakes.driver import ScriptedDriver

G0, G1 = (a_uuid(number) for number in range(2))
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
        assert ["NothingOffered"] == node.reasons


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
        places.watch.change()
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
