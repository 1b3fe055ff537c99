"""The predicates come after the device manager: the plugin has answered before they refuse."""

from tests.fakes.kubelet_rig import a_container_object, a_pod_object, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE


async def test_the_room_is_raised_to_what_is_held_where_the_pod_itself_holds_ids(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=4) as (rig, plugin):
        rig.kubelet.node.published[RESOURCE] = 0

        assert (await rig.admit(a_pod_object("u1", count=2))).admitted
        assert 1 == len(plugin.allocated)


async def test_with_a_selector_that_does_not_match_an_unpublished_resource_is_lacking(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, _):
        verdict = await rig.admit(a_pod_object("u1", nodeSelector={"zone": "b"}))

        assert f"OutOf{RESOURCE}" == verdict.reason
        assert verdict.message.endswith("requested: 1, used: 0, capacity: 0")


async def test_an_unpublished_resource_is_lacking_where_others_ask_for_what_they_do_not_hold(
    tmp_path,
):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object("u1"))
        await rig.until_seen("container_started")
        await rig.kubelet.restart(lose_checkpoint=True)
        await rig.come_back(plugin)
        await rig.until_seen("admitted", 2)

        verdict = await rig.admit(a_pod_object("u2"))

        assert verdict.message.endswith("requested: 1, used: 1, capacity: 1")


async def test_after_a_lost_checkpoint_an_unpublished_resource_kills_running_pods(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, _):
        await rig.admit(a_pod_object("u1"))
        await rig.until_seen("container_started")
        rig.kubelet.node.published[RESOURCE] = 0

        await rig.kubelet.restart(lose_checkpoint=True)
        await rig.until_seen("rejected")

        verdict = rig.kubelet.pod("u1").admission
        assert f"OutOf{RESOURCE}" == verdict.reason
        assert (
            f"Pod was rejected: Node didn't have enough resource: {RESOURCE}, "
            "requested: 1, used: 0, capacity: 0"
        ) == verdict.message


async def test_what_other_active_pods_ask_for_counts_as_used(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, _):
        inits = [a_container_object("i", count=3), a_container_object("s", sidecar=True)]
        await rig.admit(a_pod_object("u1", inits=inits, created="2026-08-21T06:20:39Z"))
        await rig.admit(a_pod_object("u2", created="2026-08-21T06:20:40Z"))
        await rig.until_seen("container_started", 4)
        rig.kubelet.node.published[RESOURCE] = 3  # the init phase needs 3, what stays 2

        await rig.kubelet.restart(lose_checkpoint=True)

        text = (await rig.until_seen("rejected")).text
        assert text.endswith("requested: 1, used: 3, capacity: 3")
        assert rig.kubelet.pod("u1").admission.admitted
