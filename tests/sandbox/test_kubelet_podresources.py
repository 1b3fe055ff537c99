"""PodResources as the agent meets it: the witness of an admission, and its rate limit."""

import asyncio

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.wire.v1 import (
    GetPodResourcesRequest,
    ListPodResourcesRequest,
)
from tests.fakes.kubelet_rig import KubeletRig, a_container_object, a_pod_object, a_rig_with_plugin


async def get(rig: KubeletRig, name: str) -> dict[str, int] | str | None:
    """Container → number of entries; the refusal's text where there is one."""
    async with rig.witness() as witness:
        try:
            answer = await witness.get(GetPodResourcesRequest(name, "default"))
        except GRPCError as error:
            if error.status is not Status.UNKNOWN:
                raise
            return error.message
    return {c.name: len(c.devices) for c in answer.pod_resources.containers}


def not_found(name: str) -> str:
    return f"pod {name} in namespace default not found"


async def test_a_rejected_or_ended_pod_is_not_found(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        plugin.script.refusals.append(GRPCError(Status.FAILED_PRECONDITION, "no"))
        await rig.admit(a_pod_object("no"))
        await rig.admit(a_pod_object("over"))
        await rig.soon(rig.kubelet.pod_gone("over"))

        assert not_found("no") == await get(rig, "no")
        assert not_found("over") == await get(rig, "over")
        assert not_found("never") == await get(rig, "never")


async def test_sidecars_are_listed_first_and_init_containers_never(tmp_path):
    pod = a_pod_object(
        inits=[a_container_object("init"), a_container_object("side", sidecar=True)],
    )
    async with a_rig_with_plugin(tmp_path) as (rig, _):
        await rig.admit(pod)

        known = await get(rig, "u1")
        assert {"side": 1, "main": 1} == known
        assert ["side", "main"] == list(known)


async def test_the_rate_limit_is_a_burst_of_ten_then_a_hundred_a_second(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, _), rig.witness() as witness:
        answers: list[object] = []

        async def ask(times: int) -> int:
            answers.clear()
            for _ in range(times):
                try:
                    answers.append(await witness.list(ListPodResourcesRequest()))
                except GRPCError as error:
                    answers.append((error.status, error.message))
            return times - answers.count(refused)

        refused = (Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        assert 10 == await ask(30)
        await asyncio.sleep(0.0501)
        assert 5 == await ask(30)
        await asyncio.sleep(10)
        assert 10 == await ask(30)
        assert [refused] * 20 == answers[10:]


async def test_a_list_after_a_pods_end_un_marks_the_ids_in_flight(tmp_path):
    """A worker's call is in flight, a pod ends, anybody lists: its id is offered to the next."""
    async with a_rig_with_plugin(tmp_path, count=2) as (rig, plugin):
        await rig.admit(a_pod_object("u1"))
        await rig.until_seen("container_started")
        await rig.kubelet.restart(lose_checkpoint=True)
        await rig.come_back(plugin)
        await rig.until_seen("admitted", 2)
        await asyncio.sleep(1)
        await rig.admit(a_pod_object("ends"))
        plugin.script.gate = asyncio.Event()
        plugin.allocating.clear()
        await rig.kubelet.container_died("u1", "main")
        await rig.soon(plugin.allocating.wait())
        (in_flight,) = plugin.allocated[-1]

        await rig.soon(rig.kubelet.pod_gone("ends"))
        async with rig.witness() as witness:
            await witness.list(ListPodResourcesRequest())
        plugin.script.gate = None
        await rig.admit(a_pod_object("next", count=2))

        assert in_flight in plugin.allocated[-1]
