"""What a kubelet tells of a pod at the moment of a call, seen from inside the call.

Each test runs against the real kubelet and, as far as it has the rule, against the model of it. A
panic of kubelet 1.36 through overlapping calls is never provoked here.
"""

import asyncio

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.wire.v1 import GetPodResourcesRequest
from tests.peers.lab.nodes import first

REFUSAL = GRPCError(Status.FAILED_PRECONDITION, "test refusal, second sentence. [HA-3f9c]")
NONE: frozenset[str] = frozenset()


def views(node, *names):
    """From inside a call: what PodResources says of these pods, slowly enough for its limit."""

    async def look():
        found = {name: await node.held(name) for name in names}
        await asyncio.sleep(0.012 * len(names))  # 100 questions a second are answered
        return found

    return look


async def test_get_names_the_pod_and_the_container_that_are_being_admitted(node):
    async with node.plugin(count=8) as plugin:
        plugin.look = views(node, "pa", "pb", "pi")
        two = (node.container("c1"), node.container("c2"))
        await node.create("pa", *two)
        await node.create("pb", *two)
        await node.create("pi", *two, inits=(node.init(),))
        for name in ("pa", "pb", "pi"):
            await node.until_phase(name, "Running")

        told = [call.found for call in plugin.calls]
        pods = [pod for pod in ("pa", "pb", "pi") for _ in range(3 if pod == "pi" else 2)]
        order = list(dict.fromkeys(map(admitted_last, told)))
        assert sorted(order) == ["pa", "pb", "pi"]
        assert sorted(pods) == sorted(map(admitted_last, told))
        for call, found in zip(plugin.calls, told, strict=True):
            pod = admitted_last(found)
            assert NONE == found[pod]["c2"], "the last container never holds anything yet"
            for later in order[order.index(pod) + 1 :]:
                assert found[later] is None, "bound, but not yet taken up"
            for earlier in order[: order.index(pod)]:
                assert NONE not in found[earlier].values()
                assert not call.ids & frozenset().union(*found[earlier].values())


def admitted_last(found) -> str:
    """The one pod that is known and lacks something."""
    (pod,) = (name for name, held in found.items() if held is not None and NONE in held.values())
    return pod


async def test_init_containers_are_never_listed_and_sidecars_from_the_start(node, plugin):
    plugin.look = views(node, "p")
    await node.runs("p", inits=(node.init(), node.sidecar("s")))

    init, sidecar, app = (call.found["p"] for call in plugin.calls)
    assert {"s": NONE, "main": NONE} == init == sidecar
    assert {"s": plugin.asked[1], "main": NONE} == app
    assert {"s": plugin.asked[1], "main": plugin.asked[2]} == await node.held("p")


async def test_a_rejected_pod_is_not_found_from_its_rejection_on(node, plugin):
    plugin.script.refusals.append(REFUSAL)
    plugin.look = views(node, "p", "q")
    await node.create("p")
    await node.runs("q")

    one, two = (call.found for call in plugin.calls)
    refused, served = ("p", "q") if one["p"] is not None else ("q", "p")
    assert {refused: {"main": NONE}, served: None} == one
    assert {refused: None, served: {"main": NONE}} == two


async def test_a_pod_that_a_later_handler_rejects_was_asked_for_and_is_not_found_after(
    node, plugin
):
    plugin.look = views(node, "p")
    await node.until_counted(4, 4)
    await node.fails("p", nodeSelector={"disk": "none"})
    await node.runs("q")

    assert [{"p": {"main": NONE}}, {"p": None}] == [call.found for call in plugin.calls]


@pytest.mark.parametrize("place", ["real"], indirect=True)
async def test_ten_questions_at_once_are_answered_and_the_refusal_names_no_pod(node):
    loop = asyncio.get_running_loop()
    answered, throttled = (Status.OK, None), (Status.RESOURCE_EXHAUSTED, "rejected by rate limit")

    async def ask(lister, name):
        try:
            await lister.get(GetPodResourcesRequest(node.known_as(name), "default"), timeout=5.0)
        except GRPCError as error:
            return error.status, error.message
        return answered

    async with node.plugin():
        # A machine may be so slow that the bucket is filled as fast as it is asked.
        for name in ("p", "q", "r"):
            await node.runs(name)
            # Nobody has asked since the plugin was listed, and a pod takes longer than the bucket.
            begun = loop.time()
            async with node.resources.lister() as lister, asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(lister, name)) for _ in range(40)]
            answers = [task.result() for task in tasks]
            refilled = 100 * (loop.time() - begun)
            if throttled in answers:
                break
        assert {answered, throttled} == {*answers}
        assert 10 <= answers.count(answered) <= 10 + refilled + 2


async def test_an_unknown_pod_is_answered_with_code_unknown(node):
    with pytest.raises(GRPCError) as caught:
        await node.get("nobody")
    text = f"pod {node.known_as('nobody')} in namespace default not found"
    assert (Status.UNKNOWN, text) == (caught.value.status, caught.value.message)


async def test_questions_are_answered_while_a_preference_and_an_allocate_are_held(node, plugin):
    plugin.choose(first)
    await node.come_back(plugin)
    held = asyncio.Event()
    plugin.look = held.wait
    await node.create("p")
    await node.until_held("p", lambda found: found == {"main": NONE})
    assert 4 == len(await node.allocatable())
    assert node.known_as("p") in {pod.name for pod in await node.resources.list()}
    held.set()
    await node.until_phase("p", "Running")


async def test_pods_deleted_while_they_wait_are_still_asked_for(node, plugin):
    plugin.hold()
    await node.create("x")
    await node.until(lambda: plugin.asked, "no Allocate")
    plugin.look = views(node, "y", "z")
    await node.create("y")
    await node.create("z")
    await node.delete("y", grace=0)
    await node.delete("z", grace=30)
    await node.until_gone("y")
    await node.until(lambda: "deletionTimestamp" in node.pod("z")["metadata"], "z is not leaving")
    plugin.let_go()
    await node.until(lambda: len(plugin.asked) == 3, f"{plugin.calls}")

    found = [call.found for call in plugin.calls[1:]]
    assert {"y": {"main": NONE}, "z": None} in found or {"y": None, "z": {"main": NONE}} in found
    assert all({"main": NONE} in one.values() for one in found)
    await node.until_gone("z")


async def test_a_pod_deleted_in_its_own_allocate_is_not_cut_short(node, plugin):
    plugin.hold()
    await node.create("p")
    await node.until(lambda: plugin.asked, "no Allocate")
    await node.delete("p", grace=0)
    await node.until_gone("p")
    assert {"main": NONE} == await node.held("p")
    assert not plugin.script.gate.is_set()
    plugin.let_go()

    await node.runs("q", node.container(count=4))


async def test_two_pods_of_one_name_look_the_same_to_get(node, plugin):
    plugin.hold()
    old = await node.create("p")
    await node.until(lambda: plugin.asked, "no Allocate")
    await node.delete("p", grace=0)
    await node.until_gone("p")
    new = await node.create("p")
    assert {"main": NONE} == await node.held("p")
    plugin.look = views(node, "p")
    plugin.let_go()
    await node.until_phase("p", "Running")

    assert old != new == node.pod("p")["metadata"]["uid"]
    assert {"main": NONE} == plugin.calls[1].found["p"]


async def test_a_list_after_a_pods_end_un_marks_the_ids_in_flight(node):
    async with node.plugin(count=2) as plugin:
        plugin.choose(first)
        await node.come_back(plugin)
        await node.runs("gone", node.container(script="exec sleep 3600"))
        plugin.hold()
        await node.delete("gone", grace=1)
        await node.until_leaving("gone")
        await node.create("p")
        await node.until(lambda: len(plugin.asked) == 2, "no Allocate")
        await node.until_gone("gone")
        await node.resources.list()
        plugin.let_go()
        await node.until_phase("p", "Running")
        await node.runs("q", node.container(count=1))

        (available, _, _) = plugin.preferred[-1]
        assert {"g0", "g1"} == set(available), "a running pod holds one of them"
        assert 3 == len(plugin.asked)


async def test_the_sockets_identity_tells_a_new_kubelet_by_its_change_time(node, table):
    socket = node.plugins / "kubelet.sock"
    before = socket.stat()
    await node.restart()

    after = socket.stat()
    same = before.st_ino == after.st_ino
    kind = type(node).__name__
    table.add(f"inode of kubelet.sock is the same after a restart ({kind})", same, unit="")
    assert before.st_ctime_ns != after.st_ctime_ns
