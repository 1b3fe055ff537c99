"""What a new kubelet process, a reboot or a lost checkpoint does to pods that were admitted."""

import asyncio

from agent.wire.v1beta1 import DevicePluginOptions
from tests.fakes.kubelet_rig import a_container_object, a_pod_object, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE, devices

NOTHING_HEALTHY = (
    "Pod was rejected: Allocate failed due to no healthy devices present; "
    f"cannot allocate unhealthy devices {RESOURCE}, which is unexpected"
)


async def test_running_containers_pass_although_the_plugin_is_away(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object("u1"))
        await rig.soon(rig.kubelet.until_running("u1", "main"))
        held = rig.ids()

        await rig.kubelet.restart()
        await rig.until_seen("admitted", 2)

        assert held == rig.ids()
        assert 1 == len(plugin.allocated)
        assert {"main"} == rig.kubelet.pod("u1").running


async def test_a_pod_with_one_dead_container_is_rejected_whole_while_the_plugin_is_away(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, _):
        pod = a_pod_object(containers=[a_container_object("a"), a_container_object("b")])
        await rig.admit(pod)
        await rig.soon(rig.kubelet.until_running("u1", "b"))
        await rig.kubelet.kill()
        await rig.kubelet.container_died("u1", "b")

        await rig.kubelet.start()
        await rig.until_seen("rejected")

        assert NOTHING_HEALTHY == rig.kubelet.pod("u1").admission.message
        assert set() == rig.kubelet.pod("u1").running, "its other container is killed"


async def test_a_finished_init_container_with_ids_fails_the_pod_while_the_plugin_is_away(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, _):
        await rig.admit(a_pod_object(inits=[a_container_object("init")], count=0))
        await rig.soon(rig.kubelet.until_running("u1", "main"))

        await rig.kubelet.restart()

        assert NOTHING_HEALTHY == (await rig.until_seen("rejected")).text


async def test_recorded_ids_are_admitted_without_a_call_once_the_plugin_is_back(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object(inits=[a_container_object("init")]))
        held = rig.ids()

        await rig.kubelet.reboot()
        await rig.come_back(plugin)
        await rig.until_seen("admitted", 2)

        assert held == rig.ids()
        assert 2 == len(plugin.allocated)
        await rig.soon(rig.kubelet.until_running("u1", "main"))
        starts = [event.container for event in rig.seen("container_started")]
        assert ["init", "main"] * 2 == starts, "init containers run again"


async def test_a_reboot_without_the_plugin_rejects_every_pod_that_holds_ids(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, _):
        for uid in ("u1", "u2"):
            await rig.admit(a_pod_object(uid))
        await rig.admit(a_pod_object("plain", count=0))

        await rig.kubelet.reboot()
        await rig.until_seen("admitted", 4)

        rejected = {event.pod: event.text for event in rig.seen("rejected")}
        assert {"u1": NOTHING_HEALTHY, "u2": NOTHING_HEALTHY} == rejected


async def test_an_id_that_fell_ill_meanwhile_rejects_its_pod(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=2) as (rig, plugin):
        await rig.admit(a_pod_object("u1", count=2))
        plugin.publish([*devices(1, health="Unhealthy"), *devices(2)[1:]])
        await rig.until_listed(1)

        await rig.kubelet.reboot()
        await plugin.serve()
        await plugin.register()

        text = "previously allocated devices are no longer healthy; cannot allocate unhealthy"
        assert text in (await rig.until_seen("rejected")).text


async def test_a_changed_count_has_its_own_text(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object("u1", count=2))
        await rig.kubelet.kill()
        rig.kubelet.node.remove("u1")
        await rig.kubelet.start()
        await rig.come_back(plugin)

        verdict = await rig.admit(a_pod_object("u1", count=3))

        text = f'pod "u1" container "main" changed request for resource "{RESOURCE}" from 2 to 3'
        assert text in verdict.message


async def test_a_lost_checkpoint_asks_nothing_for_running_containers(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object("u1"))
        await rig.soon(rig.kubelet.until_running("u1", "main"))

        await rig.kubelet.restart(lose_checkpoint=True)
        await rig.come_back(plugin)
        await rig.until_seen("admitted", 2)

        assert {} == rig.ids()
        assert 1 == len(plugin.allocated)


async def test_a_reboot_with_a_lost_checkpoint_allocates_in_order_of_creation(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=8) as (rig, plugin):
        stamps = {"late": "2026-08-21T06:20:42Z", "early": "2026-08-21T06:20:40Z"}
        for uid, created in stamps.items():
            await rig.admit(a_pod_object(uid, created=created))

        await rig.kubelet.reboot(lose_checkpoint=True)
        await rig.come_back(plugin)
        await rig.until_seen("admitted", 4)

        assert ["late", "early", "early", "late"] == [e.pod for e in rig.seen("allocated")]


async def test_a_plugin_that_is_back_within_09_seconds_saves_every_pod(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object("u1"))
        await rig.kubelet.reboot()
        await asyncio.sleep(0.85)
        await rig.come_back(plugin)

        await rig.until_seen("admitted", 2)
        assert [] == rig.seen("rejected")


async def test_a_kill_in_an_allocate_records_nothing_and_asks_again(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        plugin.script.gate = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            verdict = group.create_task(rig.admit(a_pod_object()))
            await plugin.allocating.wait()
            await rig.kubelet.kill()
            plugin.script.gate.set()
            assert not verdict.done()
            await rig.kubelet.start()
            assert {} == rig.ids()
            await rig.come_back(plugin)

        assert verdict.result().admitted
        assert 2 == len(plugin.allocated)


async def test_until_the_plugin_registers_there_are_no_options_to_go_by(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        plugin.script.options = DevicePluginOptions(pre_start_required=True)
        await plugin.register()
        await rig.admit(a_pod_object())
        await rig.until_seen("prestarted")
        await rig.kubelet.restart()
        await rig.until_seen("admitted", 2)

        await rig.kubelet.container_died("u1", "main")

        await rig.until_seen("container_started", 2)
        assert 1 == len(plugin.pre_started), "skipped, and the recorded answer is used"
        assert 1 == len(plugin.allocated)
