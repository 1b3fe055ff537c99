"""HAMi's device plugin beside the agent, and the way back to it, as it is and as it goes wrong."""

import asyncio
import json

from agent import cluster as annotations
from tests.peers.lab.agents import RESOURCE, SOURCE, agent_command
from tests.peers.lab.clockwork import wall
from tests.peers.lab.cluster import ACCOUNT
from tests.peers.lab.faults import dies
from tests.peers.lab.grants import environment_bytes, expected_inside, oversold, seen_inside
from tests.peers.lab.identities import NODE_USER
from tests.peers.lab.node_state import node_of, until_allocatable
from tests.peers.lab.part import Part
from tests.peers.lab.pods import (
    a_telling_pod,
    delete,
    lives_of,
    run,
    until_deleted,
    until_settled,
    until_told,
)
from tests.peers.lab.switch import (
    BACK,
    MANAGER,
    WITHIN,
    allocated,
    booked,
    hand_over,
    offers,
    promised,
    until_adopted,
    until_serving,
)
from tests.peers.lab.waiting import until, until_answer

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
