"""Pods of the store through the kubelet model and back into their status."""

import asyncio

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.wire.v1beta1 import DevicePluginOptions
from tests.fakes.kubelet_rig import a_container_object
from tests.fakes.node_rig import a_node_rig


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


async def test_a_refused_pod_is_failed_with_the_plugins_words(tmp_path):
    async with a_node_rig(tmp_path) as node:
        node.plugin.script.refusals.append(GRPCError(Status.FAILED_PRECONDITION, "no [HA-1]"))
        node.create("p")

        await node.phases(p="Failed")
        status = node.pod("p")["status"]
        assert "UnexpectedAdmissionError" == status["reason"]
        assert (
            "Pod was rejected: Allocate failed due to rpc error: code = FailedPrecondition "
            "desc = no [HA-1], which is unexpected"
        ) == status["message"]

        node.store.delete("pods", "default", "p")
        await asyncio.sleep(1)
        assert {} == node.rig.kubelet.node.pods


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


async def test_a_graceful_deletion_ends_the_pod_and_removes_it(tmp_path):
    async with a_node_rig(tmp_path) as node:
        node.create("p")
        await node.phases(p="Running")

        node.store.delete("pods", "default", "p")
        assert node.pod("p")["metadata"]["deletionTimestamp"]

        await node.phases(p=None)
        assert {} == node.rig.kubelet.node.pods


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


async def test_a_pod_deleted_in_its_own_allocate_holds_nothing_for_the_next(tmp_path):
    async with a_node_rig(tmp_path) as node:
        gate = node.plugin.script.gate = asyncio.Event()
        node.create("p")
        await node.plugin.allocating.wait()
        node.store.delete("pods", "default", "p", grace=0)
        await asyncio.sleep(0.1)
        node.create("q", count=4)
        await asyncio.sleep(0.1)

        gate.set()

        await node.phases(p=None, q="Running")


async def test_a_new_pod_of_the_same_name_is_another_pod(tmp_path):
    async with a_node_rig(tmp_path) as node:
        gate = node.plugin.script.gate = asyncio.Event()
        old = node.create("p")
        await node.plugin.allocating.wait()
        node.store.delete("pods", "default", "p", grace=0)
        new = node.create("p")
        await asyncio.sleep(1)
        gate.set()

        await node.phases(p="Running")
        assert [old, new] == [event.pod for event in node.rig.seen("allocated")]
        assert {(new, "main")} <= node.rig.ids().keys()


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


async def test_a_reboot_without_the_plugin_fails_running_pods(tmp_path):
    async with a_node_rig(tmp_path) as node:
        node.create("p")
        await node.phases(p="Running")

        await node.rig.kubelet.reboot()

        await node.phases(p="Failed")
        assert "containerStatuses" not in node.pod("p")["status"]


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


async def test_a_container_that_waits_for_its_plugin_says_why(tmp_path):
    async with a_node_rig(tmp_path) as node:
        error = GRPCError(Status.INTERNAL, "cold")
        node.plugin.script.options = DevicePluginOptions(pre_start_required=True)
        node.plugin.script.pre_start_errors += [error]
        await node.plugin.register()
        node.create("p", inits=[a_container_object("init")])

        def states() -> list[str]:
            status = node.pod("p")["status"]
            found = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
            return [s["state"].get("waiting", {}).get("reason", "") for s in found]

        await node.sees(lambda: states() == ["CreateContainerConfigError", "PodInitializing"])
        assert "Pending" == node.phase("p")
        await node.phases(p="Running")
        assert ["", ""] == states()
