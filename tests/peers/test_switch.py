"""From HAMi's device plugin to the agent under pods that run: none loses its share, or is oversold.

HAMi's plugin is a stand-in of ours; see lab/hami_plugin.py.
"""

import asyncio
import json

import pytest

from agent import cluster as annotations
from agent.allocate.edits import LOCK_DIRECTORY
from agent.model import GpuUuid
from tests.peers.lab.agents import RESOURCE, SOURCE, agent_command
from tests.peers.lab.cluster import ACCOUNT
from tests.peers.lab.grants import (
    environment_bytes,
    expected_inside,
    grants,
    oversold,
    seen_inside,
    seen_mounts,
    told_environment,
)
from tests.peers.lab.identities import NODE_USER
from tests.peers.lab.node_state import (
    gpu_uuids,
    node_of,
    notes_of,
    until_allocatable,
    until_offered,
    until_unlocked,
)
from tests.peers.lab.nodes import dies
from tests.peers.lab.part import Part
from tests.peers.lab.placement import lock, now, place, share, wall
from tests.peers.lab.pods import (
    PODS,
    a_container,
    a_pod,
    a_telling_pod,
    as_seen,
    delete,
    gpu_of,
    lives_of,
    run,
    run_shapes,
    until_deleted,
    until_failed,
    until_running,
    until_settled,
    until_told,
)
from tests.peers.lab.settings import BOUND, RenamedFiles, open_files
from tests.peers.lab.space import until, until_answer
from tests.peers.lab.switch import (
    BACK,
    MANAGER,
    WITHIN,
    allocated,
    booked,
    hand_over,
    lock_directory,
    offers,
    promised,
    until_adopted,
    until_serving,
)
from tests.peers.lab.table import FAR

LARGE = a_container(memory=21560)

CACHE = "CUDA_DEVICE_MEMORY_SHARED_CACHE"


@pytest.mark.timeout(300)  # longer than what is waited for inside, which tells more
@pytest.mark.parametrize("manner", ["stopped", "killed", "beside"])
async def test_pods_run_on_and_the_agent_has_their_shares(cluster, theirs, table, manner):
    names = await run_shapes(cluster)
    before, held = lives_of(cluster, names), await cluster.kubelet.held(RESOURCE)
    slices = await cluster.kubelet.allocatable(RESOURCE)

    agent, away = await hand_over(cluster, theirs, manner)
    table.hold(f"switch from HAMi's plugin, {manner} → allocatable back", away, BACK)
    await until_adopted(cluster, agent, names)

    assert slices == await cluster.kubelet.allocatable(RESOURCE)
    assert held == await cluster.kubelet.held(RESOURCE) == booked(cluster)[1]
    new = await run(cluster, a_telling_pod(cluster, "new", gpus=2))
    assert expected_inside(cluster, "new") == await seen_inside(cluster, "new")
    await until_settled(cluster, *new)
    assert before == lives_of(cluster, names)
    assert {} == oversold(cluster)
    assert [] == agent.events("ledger.mismatch") + agent.events("ledger.kept_unread")


async def test_a_new_pod_gets_no_more_than_what_those_before_leave(cluster, theirs):
    await run(cluster, a_telling_pod(cluster, "before", memory=60000))
    await until_settled(cluster, "before")
    (held,) = grants(as_seen(cluster, "before"))["main"]
    agent, _ = await hand_over(cluster, theirs)
    await until_adopted(cluster, agent, ["before"])

    gpu = gpu_uuids(cluster).index(GpuUuid(held.uuid))
    await place(cluster, a_pod("greedy", LARGE), [[share(cluster, gpu, memory=21560)]])

    assert "[HA-4003]" in (await until_failed(cluster, "greedy"))["message"]
    await until_unlocked(cluster)
    await place(cluster, a_pod("modest", LARGE), [[share(cluster, gpu, memory=21559)]])
    await until_running(cluster, "modest")


def told(cluster, name):
    """What a container was told and sees, without its cache file's name; and where its lock is."""
    environment = told_environment(cluster, name)
    mounts = seen_mounts(cluster, name)
    mounted = mounts.pop(LOCK_DIRECTORY)
    return (environment | {CACHE: ""}, mounts), mounted


async def test_a_container_that_dies_starts_again_as_it_was(cluster, theirs):
    await run(cluster, a_telling_pod(cluster, "first", gpus=2), a_telling_pod(cluster, "second"))
    await until_settled(cluster, "first", "second")
    await until_told(cluster, "first", "second")
    environment, (inside, before) = environment_bytes(cluster, "first"), told(cluster, "second")
    agent, _ = await hand_over(cluster, theirs)
    await until_adopted(cluster, agent, ["first", "second"])

    await dies(cluster, "first")

    # The kubelet kept HAMi's answer.
    assert environment == environment_bytes(cluster, "first")
    assert [] == agent.events("alloc.answered")

    await cluster.kubelet.restart(lose_checkpoint=True)
    await until_allocatable(cluster)
    await dies(cluster, "second")

    assert ["replay"] == [one["result"] for one in agent.events("alloc.answered")]
    assert lock_directory(cluster) == before.source
    own = inside[1]["/usr/local/vgpu"]
    assert (inside, own) == told(cluster, "second")
    assert {} == oversold(cluster)


async def test_the_lock_of_a_pod_that_it_left_halfway_is_released(cluster, theirs):
    await run(cluster, a_telling_pod(cluster, "halfway"))
    await until_settled(cluster, "halfway")
    await theirs.kill()
    noted = notes_of(as_seen(cluster, "halfway"))
    unsettled = {
        annotations.TO_ALLOCATE: noted[annotations.ALLOCATED],
        annotations.BIND_PHASE: annotations.PHASE_ALLOCATING,
    }
    await cluster.api.patch(f"{PODS}/halfway", {"metadata": {"annotations": unsettled}})
    await lock(cluster, "halfway", age=float(now().timestamp()) - int(noted[annotations.BIND_TIME]))

    agent = await cluster.start_agent()
    await until_adopted(cluster, agent, ["halfway"])

    await until_unlocked(cluster)
    await run(cluster, a_telling_pod(cluster, "next"))
    assert expected_inside(cluster, "next") == await seen_inside(cluster, "next")


async def test_slices_that_are_held_stay_listed_when_the_agent_has_fewer(cluster, theirs):
    names = await run(cluster, *(a_telling_pod(cluster, f"one-{number}") for number in range(3)))
    await until_settled(cluster, *names)
    held = frozenset().union(*(await cluster.kubelet.held(RESOURCE)).values())
    gpus = len({gpu_of(text) for text in held})
    await theirs.stop()

    agent = await cluster.start_agent("--split-count", "1")
    await until_adopted(cluster, agent, names)

    async def are_listed():
        return held <= (await cluster.kubelet.offered(RESOURCE) or frozenset())

    await until_answer(are_listed, WITHIN, agent.part.tail)
    await until_offered(cluster, 8 - gpus + len(held))


# HAMi's device plugin beside the agent, and the way back to it, as it is and as it goes wrong.

EVENTS = "/api/v1/namespaces/default/events"


async def test_beside_it_the_agent_refuses_to_serve_and_disturbs_nobody(cluster, theirs):
    await run(cluster, a_telling_pod(cluster, "served"))
    await until_settled(cluster, "served")

    agent = await cluster.start_agent(user=ACCOUNT)
    async with asyncio.timeout(WITHIN):
        assert 78 == await agent.part.wait()

    (failed,) = agent.events("agent.failed")
    assert "nvidia-gpu.sock: take it off the node (HAMi's: the DaemonSet" in failed["err"]
    events = (await cluster.api.get(EVENTS))["items"]
    assert "PluginConflict" in [one["reason"] for one in events]
    assert await offers(cluster, 80)
    await run(cluster, a_telling_pod(cluster, "later"))
    await until_settled(cluster, "later")
    assert ["served", "later"] == allocated(theirs)


async def test_one_that_comes_beside_the_agent_is_told_and_outlived(cluster, theirs):
    await theirs.stop()
    agent = await cluster.start_registered_agent()
    await theirs.start()
    await until(lambda: bool(agent.events("registration.rival")), WITHIN, agent.part.tail)
    await run(cluster, a_telling_pod(cluster, "theirs"))
    await until_settled(cluster, "theirs")
    assert ["theirs"] == allocated(theirs)

    await theirs.kill()

    # Up to kubelet 1.36 it takes the resource with it, and the agent's stream stays open.
    await until(lambda: bool(agent.events("registration.rival_gone")), WITHIN, agent.part.tail)
    await until_allocatable(cluster)
    await until_adopted(cluster, agent, ["theirs"])
    await run(cluster, a_telling_pod(cluster, "ours"))
    assert ["ours"] == [one["pod"] for one in agent.events("alloc.answered")]


async def test_the_way_back_loses_nothing_either(cluster, theirs, table):
    before = await run(cluster, a_telling_pod(cluster, "hami-1"))
    await until_settled(cluster, *before)
    agent, _ = await hand_over(cluster, theirs)
    await until_adopted(cluster, agent, before)
    ours = await run(cluster, a_telling_pod(cluster, "ours-1"), a_telling_pod(cluster, "ours-2"))
    await until_settled(cluster, *ours)
    await until_told(cluster, *ours)
    living, held = lives_of(cluster, [*before, *ours]), await cluster.kubelet.held(RESOURCE)

    began = wall()
    await agent.part.stop()
    await theirs.start()
    await until_answer(lambda: offers(cluster, 80), WITHIN, theirs.tail)
    table.hold("switch back to HAMi's plugin → allocatable back", wall() - began, BACK)
    await cluster.nodes.until(lambda: MANAGER in writers(cluster), WITHIN, "it does not report")
    await run(cluster, a_telling_pod(cluster, "hami-2"))
    await until_settled(cluster, "hami-2")

    assert living == lives_of(cluster, [*before, *ours])
    assert held.items() <= (await cluster.kubelet.held(RESOURCE)).items()
    assert ["hami-1", "hami-2"] == allocated(theirs)
    inside = environment_bytes(cluster, "ours-1")
    await dies(cluster, "ours-1")
    assert inside == environment_bytes(cluster, "ours-1")
    await once_more(cluster, theirs, ["hami-1", "hami-2", "ours-1"], gone="ours-2")


async def once_more(cluster, theirs, names, *, gone):
    """To the agent again, which has rows of the time before, one of them of a pod that is gone."""
    await delete(cluster, gone, grace=0)
    await until_deleted(cluster, gone)
    agent, _ = await hand_over(cluster, theirs)
    wanted = promised(cluster, names).items()
    await until(lambda: wanted <= booked(cluster)[0].items(), WITHIN, agent.part.tail)
    await run(cluster, a_telling_pod(cluster, "ours-3"))
    assert expected_inside(cluster, "ours-3") == await seen_inside(cluster, "ours-3")
    assert {} == oversold(cluster)


def writers(cluster):
    """Who wrote the Node's register annotation last, as the API server notes it."""
    field = f"f:{annotations.REGISTER}"
    return [
        one["manager"]
        for one in node_of(cluster)["metadata"]["managedFields"]
        if field in one["fieldsV1"].get("f:metadata", {}).get("f:annotations", {})
    ]


async def test_started_before_the_agent_ends_it_must_be_started_again(cluster, theirs):
    await theirs.stop()
    agent = await cluster.start_registered_agent()
    await theirs.start()
    await until(lambda: bool(agent.events("registration.rival")), WITHIN, agent.part.tail)

    await agent.part.stop()

    await until_answer(lambda: offers(cluster, 0), WITHIN, theirs.tail)
    await theirs.stop()
    await theirs.start()
    await until_serving(cluster, theirs)


async def doctor(cluster, *flags):
    """What `doctor --pre` finds on the node: its exit code; by id, verdicts with what was said."""
    kubeconfig = cluster.plane.kubeconfig(NODE_USER)
    flags = (*cluster.release.flags, *flags)
    *start, _ = agent_command(kubeconfig, "h100:8", flags)[:4]
    words = (
        *start,
        "doctor",
        "--pre",
        "-o",
        "json",
        *agent_command(kubeconfig, "h100:8", flags)[4:],
    )
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
    part = Part(
        "doctor", words, cluster.root / "logs", space=cluster.space, environment=environment
    )
    part.log.unlink(missing_ok=True)
    await part.start()
    async with asyncio.timeout(WITHIN):
        code = await part.wait()
    found = {}
    for one in json.loads(part.said())["data"]["findings"]:
        found.setdefault(one["id"], []).append((one["verdict"], one["subject"], one["said"]))
    return code, found


async def test_the_doctor_tells_who_serves_what_is_held_and_what_is_left(cluster, theirs):
    await run(cluster, a_telling_pod(cluster, "held"))
    await until_settled(cluster, "held")
    socket = "/var/lib/kubelet/device-plugins/nvidia-gpu.sock"

    code, found = await doctor(cluster)
    assert 1 == code
    assert [("wrong", socket, "another device plugin answers here")] == found["P-PLUGIN"]
    assert "1 container holds slices; the agent takes them over" in found["P-WITNESS"][0][2]
    assert ["note"] == [verdict for verdict, *_ in found["P-MONITOR"]]
    assert ["ok"] == [verdict for verdict, *_ in found["P-REPORT"]]

    # As the documents tell: beside an agent that only observes.
    observer = await cluster.start_agent("--observe", "--takeover", user=ACCOUNT)
    await until(lambda: bool(observer.events("web.listening")), WITHIN, observer.part.tail)
    code, found = await doctor(cluster, "--takeover", "--split-count", "5")
    assert 0 == code
    assert [("note", socket, "another device plugin answers here")] == found["P-PLUGIN"]
    ((verdict, _, said),) = found["P-REPORT"]
    assert "note" == verdict
    assert said.endswith("slices 10, and the agent would say 5, and 7 more")

    assert [] == observer.events("observe.would_write") + observer.events("plugin.serving")
    assert ["held"] == allocated(theirs)

    await theirs.kill()
    code, found = await doctor(cluster)
    assert 0 == code
    assert ("note", socket, "left behind by another device plugin") in found["P-PLUGIN"]


# The resource gets another name: it waits while a pod holds slices, and comes once it is gone.

FORMER, PRESENT = RESOURCE, "example.com/vgpu"

CLOSED = 90.0
"""Seconds in which the row of a deleted pod is closed: it outlives it by a minute."""


def asking_for(pod, resource):
    """The same pod, whose containers ask for one slice by that name."""

    def named(container):
        limits = {resource: "1"}
        return {**container, "resources": {"limits": limits}}

    spec = pod["spec"]
    return {**pod, "spec": {**spec, "containers": [named(one) for one in spec["containers"]]}}


async def runs(cluster, pod, gpu):
    """The pod is placed on that GPU and runs."""
    await place(cluster, pod, [[share(cluster, gpu)]])
    await until_running(cluster, pod["metadata"]["name"])
    await until_settled(cluster, pod["metadata"]["name"])


@pytest.mark.timeout(240)
async def test_another_name_waits_for_the_last_pod_and_then_comes_by_itself(cluster):
    files = open_files(cluster, RenamedFiles)
    path = files.write("config.yaml", f"sharing: {{resourceName: {FORMER}}}\n")
    agent = await cluster.start_registered_agent("--config", str(path))
    await runs(cluster, a_telling_pod(cluster, "resident"), 0)

    files.write("config.yaml", f"sharing: {{resourceName: {PRESENT}}}\n")
    await until(
        lambda: bool(agent.events("config.rejected")), FAR * BOUND, lambda: "nothing is refused"
    )
    (refused,) = agent.events("config.rejected")
    assert f"cannot change from {FORMER} to {PRESENT} while" in refused["err"]
    assert "slices are held by " in refused["err"]
    assert "/resident;" in refused["err"]
    await runs(cluster, a_telling_pod(cluster, "late"), 1)
    assert 80 == len(await cluster.kubelet.allocatable(FORMER))
    assert not await cluster.kubelet.allocatable(PRESENT)

    for name in ("late", "resident"):
        await delete(cluster, name, grace=0)
        await until_deleted(cluster, name)
    await until_allocatable(cluster, 80, CLOSED, PRESENT)
    await until_allocatable(cluster, 0)
    await runs(cluster, asking_for(a_telling_pod(cluster, "young"), PRESENT), 2)
    assert [] == agent.events("alloc.refused")
