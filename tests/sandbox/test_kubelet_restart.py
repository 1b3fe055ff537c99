"""What a new kubelet process, a reboot or a lost checkpoint does to pods that were admitted."""

import asyncio

from agent.wire.v1beta1 import DevicePluginOptions
from tests.fakes.kubelet_rig import a_container_object, a_pod_object, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE

NOTHING_HEALTHY = (
    "Pod was rejected: Allocate failed due to no healthy devices present; "
    f"cannot allocate unhealthy devices {RESOURCE}, which is unexpected"
)


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
