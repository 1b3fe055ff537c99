"""What the kubelet model reads in a Pod object."""

import asyncio

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.sandbox.kubelet.allocation import DeviceRecord, merge
from agent.sandbox.kubelet.pods import read_pod
from agent.wire.v1beta1 import CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount
from tests.fakes.kubelet_rig import KubeletRig, a_container_object, a_pod_object, a_rig_with_plugin
from tests.fakes.node_rig import a_node_rig
from tests.fakes.plugin import RESOURCE, ScriptedPlugin, devices


def test_a_limit_that_is_no_whole_number_is_refused():
    container = a_container_object("a")
    container["resources"]["limits"] = {RESOURCE: "1.5"}
    with pytest.raises(ValueError, match="no whole number"):
        read_pod(a_pod_object(containers=[container]))


def test_init_containers_come_first_and_only_extended_limits_count():
    pod = read_pod(
        a_pod_object(
            inits=[a_container_object("i"), a_container_object("s", sidecar=True)],
            containers=[a_container_object("a", count=2), {"name": "bare"}],
        )
    )

    assert [("i", "init"), ("s", "sidecar"), ("a", "app"), ("bare", "app")] == [
        (c.name, c.kind) for c in pod.containers
    ]
    assert [{RESOURCE: 1}, {RESOURCE: 1}, {RESOURCE: 2}, {}] == [c.limits for c in pod.containers]
    assert "a" == pod.container("a").name
    with pytest.raises(KeyError, match="no container x"):
        pod.container("x")


@pytest.mark.parametrize(
    ("inits", "apps", "expected"),
    [
        ([], [1, 2], 3),
        ([("i", 5, False)], [1, 2], 5),
        ([("s", 2, True), ("i", 2, False)], [1], 4),
        ([("i", 2, False), ("s", 2, True)], [1], 3),
    ],
)
def test_a_pod_requests_the_greater_of_its_phases(inits, apps, expected):
    pod = a_pod_object(
        inits=[a_container_object(n, count=c, sidecar=s) for n, c, s in inits],
        containers=[a_container_object(f"a{n}", count=c) for n, c in enumerate(apps)],
    )

    assert expected == read_pod(pod).request(RESOURCE)


def test_answers_of_several_resources_are_merged_and_the_first_of_a_key_wins():
    first = ContainerAllocateResponse(
        envs={"A": "1", "B": "1"},
        mounts=[Mount("/m", "/first")],
        devices=[DeviceSpec("/dev/x", "/dev/first", "rw")],
        annotations={"k": "1"},
        cdi_devices=[CdiDevice("v/c=a")],
    )
    second = ContainerAllocateResponse(
        envs={"B": "2", "C": "2"},
        mounts=[Mount("/m", "/second"), Mount("/n", "/second")],
        devices=[DeviceSpec("/dev/x", "/dev/second", "r"), DeviceSpec("/dev/y", "/dev/y", "r")],
        annotations={"k": "2"},
        cdi_devices=[CdiDevice("v/c=a"), CdiDevice("v/c=b")],
    )

    whole = merge([DeviceRecord({}, first), DeviceRecord({}, second)])

    assert {"A": "1", "B": "1", "C": "2"} == whole.envs
    assert [("/m", "/first"), ("/n", "/second")] == [
        (m.container_path, m.host_path) for m in whole.mounts
    ]
    assert ["/dev/first", "/dev/y"] == [d.host_path for d in whole.devices]
    assert {"k": "1"} == whole.annotations
    assert ["v/c=a", "v/c=b"] == [d.name for d in whole.cdi_devices]
    assert {"A": "1", "B": "1"} == first.envs, "the recorded answers stay as they are"
    assert 1 == len(first.mounts)


# Pods of the store through the kubelet model and back into their status.


async def test_a_bound_pod_is_admitted_and_reported_running(tmp_path):
    async with a_node_rig(tmp_path) as node:
        node.create("p", inits=[a_container_object("init")])

        await node.phases(p="Running")
        status = node.pod("p")["status"]
        (main,), (init,) = status["containerStatuses"], status["initContainerStatuses"]
        assert {"running"} == main["state"].keys()
        assert "Completed" == init["state"]["terminated"]["reason"]
        assert main["containerID"].startswith("containerd://")
        ready = {c["type"]: c["status"] for c in status["conditions"]}
        names = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        assert dict.fromkeys(names, "True") == ready


async def test_a_rejection_right_after_the_kubelets_start_is_told_with_its_first_full_report(
    tmp_path,
):
    async with a_node_rig(tmp_path) as node:
        loop, started = asyncio.get_running_loop(), node.rig.seen("started")[0].elapsed
        refusal = GRPCError(Status.FAILED_PRECONDITION, "no")
        node.plugin.script.refusals += [refusal, refusal]
        node.create("early")
        await node.rig.until_seen("rejected")
        assert loop.time() < started + 2
        await asyncio.sleep(3)
        node.create("late")
        await node.phases(early="Pending", late="Failed")

        await node.phases(early="Failed", late="Failed")
        assert 10 == round(loop.time() - started)


async def test_a_pod_of_another_node_is_left_alone(tmp_path):
    async with a_node_rig(tmp_path) as node:
        pod = {"metadata": {"name": "p"}, "spec": {"nodeName": "node-b", "containers": []}}
        node.store.create("pods", pod)
        await asyncio.sleep(60)

        assert "Pending" == node.phase("p")
        assert {} == node.rig.kubelet.node.pods


async def test_pods_that_were_there_before_are_admitted_in_order_of_creation(tmp_path):
    async with a_node_rig(tmp_path) as node:
        node.plugin.script.gate = asyncio.Event()
        first = node.create("z")
        await node.plugin.allocating.wait()
        rest = [node.create("b")]
        await asyncio.sleep(2)
        rest.append(node.create("a"))
        node.plugin.script.gate.set()

        await node.phases(a="Running", b="Running", z="Running")
        assert [first, *rest] == [event.pod for event in node.rig.seen("admitted")]


async def test_pods_deleted_while_they_wait_are_still_admitted(tmp_path):
    async with a_node_rig(tmp_path) as node:
        gate = node.plugin.script.gate = asyncio.Event()
        node.create("x")
        await node.plugin.allocating.wait()
        forced, graceful = node.create("y"), node.create("z")
        await asyncio.sleep(0.1)
        node.store.delete("pods", "default", "y", grace=0)
        node.store.delete("pods", "default", "z", grace=30)
        await asyncio.sleep(2)
        assert node.pod("y") is None
        gate.set()

        await node.phases(z="Running")
        assert node.pod("z")["metadata"]["deletionTimestamp"]
        await node.phases(x="Running", z=None)
        assert {forced, graceful} < {event.pod for event in node.rig.seen("allocated")}
        assert 1 == len(node.rig.kubelet.node.pods)


async def test_a_reboot_without_the_plugin_fails_running_pods(tmp_path):
    async with a_node_rig(tmp_path) as node:
        node.create("p")
        await node.phases(p="Running")

        await node.rig.kubelet.reboot()

        await node.phases(p="Failed")
        assert "containerStatuses" not in node.pod("p")["status"]


async def test_a_pod_that_was_deleted_while_the_kubelet_is_down_is_not_admitted(tmp_path):
    async with a_node_rig(tmp_path) as node:
        await node.rig.kubelet.kill()
        node.create("p")
        await asyncio.sleep(1)
        node.store.delete("pods", "default", "p", grace=0)
        await asyncio.sleep(1)

        await node.rig.kubelet.start()
        await node.rig.come_back(node.plugin)
        await asyncio.sleep(5)

        assert [] == node.rig.seen("admitting")


async def test_a_deletion_that_has_begun_ends_while_an_allocate_is_held(tmp_path):
    async with a_node_rig(tmp_path) as node:
        node.create("p")
        await node.phases(p="Running")
        node.plugin.script.gate = asyncio.Event()
        node.plugin.allocating.clear()
        node.store.delete("pods", "default", "p")
        await asyncio.sleep(0.1)
        node.create("q")
        await node.plugin.allocating.wait()

        await node.phases(p=None, q="Pending")

        node.plugin.script.gate.set()
        await node.phases(q="Running")


async def test_a_job_ends_succeeded_and_frees_its_ids(tmp_path):
    async with a_node_rig(tmp_path, count=1) as node:
        node.create("job", annotations={"sandbox/run-seconds": "40"})
        await node.phases(job="Running")
        started = asyncio.get_running_loop().time()
        await node.phases(job="Succeeded")

        assert 40 <= round(asyncio.get_running_loop().time() - started, 1) + 0.1
        terminated = node.pod("job")["status"]["containerStatuses"][0]["state"]["terminated"]
        assert 0 == terminated["exitCode"]
        node.create("next")
        await node.phases(next="Running")
        node.store.delete("pods", "default", "job")
        await asyncio.sleep(1)
        assert 1 == len(node.rig.kubelet.node.pods)


async def test_a_job_deleted_before_its_time_is_only_deleted(tmp_path):
    async with a_node_rig(tmp_path) as node:
        node.create("job", annotations={"sandbox/run-seconds": "40"})
        await node.phases(job="Running")

        node.store.delete("pods", "default", "job")

        await node.phases(job=None)


async def test_a_restarted_container_has_a_new_id_and_count(tmp_path):
    async with a_node_rig(tmp_path) as node:
        uid = node.create("p")
        await node.phases(p="Running")
        before = node.pod("p")["status"]["containerStatuses"][0]

        await node.rig.kubelet.container_died(uid, "main")
        await node.sees(lambda: node.pod("p")["status"]["containerStatuses"][0]["restartCount"])

        after = node.pod("p")["status"]["containerStatuses"][0]
        assert before["containerID"] != after["containerID"]
        assert {"running"} == after["state"].keys()


async def test_a_forgotten_history_loses_no_pod(tmp_path):
    async with a_node_rig(tmp_path) as node:
        await node.rig.kubelet.kill()
        gone = node.create("gone")
        await asyncio.sleep(1)
        assert {gone} == node.rig.kubelet.node.pods.keys()
        node.store.delete("pods", "default", "gone", grace=0)
        node.create("kept")
        node.store.forget_history()
        await asyncio.sleep(1)

        await node.rig.kubelet.start()
        await node.rig.come_back(node.plugin)

        await node.phases(kept="Running")
        assert 1 == len(node.rig.kubelet.node.pods)


# The predicates come after the device manager: the plugin has answered before they refuse.


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


# Containers that start and die beside admission, and how the kubelet panics of it.

REFUSED = GRPCError(Status.FAILED_PRECONDITION, "not now")


async def lose_the_checkpoint(rig: KubeletRig, plugin: ScriptedPlugin, uids: list[str]) -> None:
    """Running pods whose records the kubelet has lost."""
    for uid in uids:
        await rig.admit(a_pod_object(uid))
    await rig.until_seen("container_started", len(uids))
    await rig.kubelet.restart(lose_checkpoint=True)
    await rig.come_back(plugin)
    await rig.until_seen("admitted", 2 * len(uids))
    await asyncio.sleep(1)  # until it has heard of everything, running containers pass unasked
    plugin.allocated.clear()
    plugin.allocating.clear()


async def a_call_is_held(rig: KubeletRig, plugin: ScriptedPlugin) -> asyncio.Event:
    """A container whose record is lost is being asked for; what lets its answer go."""
    await lose_the_checkpoint(rig, plugin, ["u1"])
    gate = plugin.script.gate = asyncio.Event()
    await rig.kubelet.container_died("u1", "main")
    await rig.soon(plugin.allocating.wait())
    plugin.script.gate = None
    return gate


async def test_refused_there_the_pod_lives_and_is_asked_again_after_8_to_10_seconds(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await lose_the_checkpoint(rig, plugin, ["u1"])
        plugin.script.refusals.append(REFUSED)

        await rig.kubelet.container_died("u1", "main")
        refused = await rig.until_seen("container_waiting")
        assert {"main": "not now"} == rig.kubelet.pod("u1").waiting
        served = await rig.until_seen("container_started", 2)

        assert 8 <= served.elapsed - refused.elapsed <= 10
        assert {} == rig.kubelet.pod("u1").waiting
        assert [] == rig.seen("rejected")


async def test_an_earlier_call_that_is_granted_beside_a_later_one_panics_the_kubelet(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        gate = await a_call_is_held(rig, plugin)
        await rig.admit(a_pod_object("new"))

        gate.set()

        panic = await rig.until_seen("panicked")
        assert "assignment to entry in nil map" == panic.text
        await rig.until_seen("started", 3)
        await rig.come_back(plugin)
        await rig.until_seen("admitted", 5)
        assert [] == rig.seen("rejected"), "the plugin was back in time: all run on"
        assert {"main"} == rig.kubelet.pod("new").running


async def test_an_earlier_call_that_is_refused_beside_a_later_one_harms_nobody(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        gate = await a_call_is_held(rig, plugin)
        assert (await rig.admit(a_pod_object("new"))).admitted

        plugin.script.refusals.append(REFUSED)
        gate.set()

        await rig.soon(rig.kubelet.until_running("u1", "main"))
        assert [] == rig.seen("panicked")
        assert {("u1", "main"), ("new", "main")} == rig.ids().keys()


async def test_a_burst_of_deaths_panics_a_kubelet_whose_plugin_grants_everything(tmp_path):
    uids = [f"u{number}" for number in range(6)]
    async with a_rig_with_plugin(tmp_path, count=12) as (rig, plugin):
        await lose_the_checkpoint(rig, plugin, uids)
        plugin.script.gate = asyncio.Event()
        for uid in uids:
            await rig.kubelet.container_died(uid, "main")
        await asyncio.sleep(2)
        assert 6 == len(plugin.allocated), "they overlap"

        plugin.script.gate.set()

        await rig.until_seen("panicked")


async def test_a_worker_waits_for_the_admission_that_is_going_on(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object("u1"))
        await rig.until_seen("container_started")
        plugin.script.gate = asyncio.Event()
        plugin.allocating.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(rig.admit(a_pod_object("u2")))
            await plugin.allocating.wait()
            await rig.kubelet.container_died("u1", "main")
            await asyncio.sleep(60)

            assert set() == rig.kubelet.pod("u1").running
            plugin.script.gate.set()
        await rig.soon(rig.kubelet.until_running("u1", "main"))


async def test_the_end_of_a_pod_waits_for_the_admission_that_is_going_on(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object("u1"))
        plugin.script.gate = asyncio.Event()
        plugin.allocating.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(rig.admit(a_pod_object("u2")))
            await plugin.allocating.wait()
            end = group.create_task(rig.kubelet.pod_gone("u1"))
            await asyncio.sleep(60)
            assert not end.done()
            plugin.script.gate.set()

        assert rig.kubelet.pod("u1") is None


async def test_a_removed_endpoint_has_its_own_text(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object())
        await rig.until_seen("container_started")
        plugin.end_streams()
        await rig.until_listed(0)
        await asyncio.sleep(301)
        assert {RESOURCE} == rig.kubelet.tick().removed

        await rig.kubelet.container_died("u1", "main")

        text = f"endpoint not found in cache for a registered resource: {RESOURCE}"
        assert text == (await rig.until_seen("container_waiting")).text


# The Node object as the kubelet model keeps it.


async def test_the_node_follows_at_ticks_of_ten_seconds(tmp_path):
    async with a_node_rig(tmp_path, count=4) as node:
        loop, started = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        await node.sees(lambda: "4" == node.count("allocatable"))
        node.plugin.publish(devices(2))
        await node.rig.until_listed(2)
        await asyncio.sleep(5)
        assert "4" == node.count("allocatable")

        await node.sees(lambda: "2" == node.count("allocatable"))
        assert 10 == round(loop.time() - started)

        node.plugin.end_streams()
        await node.sees(lambda: "0" == node.count("allocatable"))
        assert "2" == node.count("capacity")
        await node.sees(lambda: "0" == node.count("capacity"))
        assert 300 < loop.time() - started < 340


async def test_an_eager_node_follows_at_once(tmp_path):
    async with a_node_rig(tmp_path, count=4, eager=True) as node:
        await node.sees(lambda: "4" == node.count("allocatable"))
        started = asyncio.get_running_loop().time()
        node.plugin.publish(devices(2))

        await node.sees(lambda: "2" == node.count("allocatable"))
        assert asyncio.get_running_loop().time() - started < 1


async def test_a_node_that_was_deleted_comes_back_with_the_kubelet(tmp_path):
    async with a_node_rig(tmp_path) as node:
        await node.sees(lambda: node.count("allocatable"))
        node.store.delete("nodes", "", "node-a")
        await asyncio.sleep(30)
        assert [] == node.store.select("nodes")

        await node.rig.kubelet.restart()

        await node.sees(lambda: node.store.select("nodes"))


async def test_what_the_node_publishes_decides_in_the_kubelets_predicates(tmp_path):
    async with a_node_rig(tmp_path, count=4, eager=True) as node:
        await node.sees(lambda: node.count("allocatable") == "4")

        def label(stored):
            stored["metadata"]["labels"]["zone"] = "a"
            return stored

        node.store.update("nodes", "", "node-a", label)
        node.plugin.publish(devices(3))
        await node.sees(lambda: node.count("allocatable") == "3")

        assert {RESOURCE: 3} == node.rig.kubelet.node.published
        assert "a" == node.rig.kubelet.node.labels["zone"]


async def test_a_pod_that_asks_for_a_removed_resource_finds_none_of_it(tmp_path):
    async with a_node_rig(tmp_path, count=4) as node:
        await node.sees(lambda: "4" == node.count("allocatable"))
        node.plugin.end_streams()
        await node.sees(lambda: "0" == node.count("capacity"))

        node.create("p")

        await node.phases(p="Failed")
        assert node.pod("p")["status"]["message"].endswith("requested: 1, used: 0, capacity: 0")
        assert [] == node.plugin.allocated
