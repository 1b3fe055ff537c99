"""How the kubelet chooses ids, in which order it refuses, and what it asks of the plugin."""

import asyncio

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.fakes.kubelet_rig import a_container_object, a_pod_object, a_rig, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE, ScriptedPlugin, answer, devices


def failed(text: str) -> str:
    return f"Pod was rejected: Allocate failed due to {text}, which is unexpected"


async def test_each_container_is_one_allocate_with_one_container_request(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=6) as (rig, plugin):
        pod = a_pod_object(
            containers=[a_container_object("a", count=2), a_container_object("b", count=3)]
        )

        verdict = await rig.admit(pod)

        assert [2, 3] == [len(ids) for ids in plugin.allocated]
        assert {"a", "b"} == verdict.containers.keys()
        assert answer(plugin.allocated[0]) == verdict.containers["a"]
        assert set(plugin.allocated[1]) == rig.ids()["u1", "b"]


async def test_a_container_that_asks_for_nothing_is_not_asked_about(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        verdict = await rig.admit(a_pod_object(count=0))

        assert verdict.admitted
        assert ContainerAllocateResponse() == verdict.containers["main"]
        assert [] == plugin.allocated


async def test_two_resources_are_asked_in_random_order(tmp_path):
    both = a_container_object()
    both["resources"]["limits"]["b.c/d"] = "1"
    async with (
        a_rig_with_plugin(tmp_path, count=40) as (rig, ours),
        ScriptedPlugin(rig.plugins, resource="b.c/d", name="o.sock", count=40) as other,
    ):
        await other.register()
        await rig.until_listed(40, "b.c/d")
        for number in range(30):
            await rig.admit(a_pod_object(f"u{number}", containers=[both]))

        order = [event.resource for event in rig.seen("allocating")]
        assert {RESOURCE, "b.c/d"} == set(order[::2])
        assert [30, 30] == [len(ours.allocated), len(other.allocated)]


async def test_ids_come_in_random_order(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=8) as (rig, plugin):
        await rig.admit(a_pod_object(count=8))

        assert sorted(plugin.allocated[0]) != plugin.allocated[0]


async def test_a_refusal_reaches_the_pod_word_for_word_and_frees_the_ids(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=1) as (rig, plugin):
        text = "two, second sentence. [HA-3f9c]"
        plugin.script.refusals.append(GRPCError(Status.FAILED_PRECONDITION, text))

        verdict = await rig.admit(a_pod_object("u1"))

        assert (False, "UnexpectedAdmissionError") == (verdict.admitted, verdict.reason)
        go = f"rpc error: code = FailedPrecondition desc = {text}"
        assert failed(go) == verdict.message
        assert (await rig.admit(a_pod_object("u2"))).admitted


async def test_an_answer_without_containers_has_its_own_text_and_leaks_the_ids(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=1) as (rig, plugin):
        plugin.script.responses = lambda _: []

        verdict = await rig.admit(a_pod_object("u1"))

        assert failed("no containers return in allocation response ") == verdict.message
        plugin.script.responses = None
        text = f"requested number of devices unavailable for {RESOURCE}. Requested: 1, Available: 0"
        assert failed(text) == (await rig.admit(a_pod_object("u2"))).message


async def test_only_the_first_container_response_counts(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        plugin.script.responses = lambda ids: [answer(ids), answer(["wrong"])]

        verdict = await rig.admit(a_pod_object())

        assert answer(plugin.allocated[0]) == verdict.containers["main"]


async def test_a_resource_that_nobody_ever_registered_is_admitted_without_ids(tmp_path):
    async with a_rig(tmp_path) as rig:
        verdict = await rig.admit(a_pod_object())

        assert verdict.admitted
        assert {} == rig.ids()


async def test_nothing_healthy_is_refused_even_for_a_count_of_zero(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        plugin.end_streams()
        await rig.until_listed(0)
        none = a_container_object()
        none["resources"]["limits"][RESOURCE] = "0"

        verdict = await rig.admit(a_pod_object(containers=[none]))

        text = f"no healthy devices present; cannot allocate unhealthy devices {RESOURCE}"
        assert failed(text) == verdict.message


async def test_too_few_free_ids_are_refused_with_both_numbers(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=4) as (rig, _):
        await rig.admit(a_pod_object("u1", count=3))

        verdict = await rig.admit(a_pod_object("u2", count=2))

        text = f"requested number of devices unavailable for {RESOURCE}. Requested: 2, Available: 1"
        assert failed(text) == verdict.message


async def test_a_resource_held_but_removed_is_unregistered(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object("u1"))
        plugin.end_streams()
        await rig.until_listed(0)
        await asyncio.sleep(301)
        rig.kubelet.tick()

        verdict = await rig.admit(a_pod_object("u2"))

        assert failed(f"cannot allocate unregistered device {RESOURCE}") == verdict.message


async def test_ids_of_an_ended_pod_are_free_for_the_next_allocation(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=1) as (rig, _):
        await rig.admit(a_pod_object("u1"))
        await rig.soon(rig.kubelet.pod_gone("u1"))
        assert {("u1", "main")} == rig.ids().keys(), "collected lazily"

        assert (await rig.admit(a_pod_object("u2"))).admitted
        assert {("u2", "main")} == rig.ids().keys()


async def test_the_second_resources_refusal_voids_the_first_ones_answer(tmp_path):
    pod = a_pod_object(containers=[a_container_object(name) for name in "abc"])
    async with a_rig_with_plugin(tmp_path, count=3) as (rig, plugin):
        plugin.script.responses = lambda ids: [] if len(plugin.allocated) == 2 else [answer(ids)]

        assert not (await rig.admit(pod)).admitted

        assert 2 == len(plugin.allocated), "the third container is not asked"
        assert {("u1", "a")} == rig.ids().keys(), "stays until the next allocation"


async def test_an_unhealthy_id_is_never_given(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=4) as (rig, plugin):
        plugin.publish([*devices(1, health="Unhealthy"), *devices(4)[1:]])
        await rig.until_listed(3)

        await rig.admit(a_pod_object(count=3))

        assert {"g1", "g2", "g3"} == set(plugin.allocated[0])


async def test_while_an_allocate_is_held_nothing_else_is_admitted(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        plugin.script.gate = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(rig.admit(a_pod_object("u1")))
            await plugin.allocating.wait()
            second = group.create_task(rig.admit(a_pod_object("u2", count=0)))
            await asyncio.sleep(60)

            assert not second.done()
            assert [] == rig.seen("admitted")
            plugin.script.gate.set()

        assert ["u1", "u2"] == [event.pod for event in rig.seen("admitted")]
        assert first.result().admitted
