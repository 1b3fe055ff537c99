"""An agent that is killed again and again, while pods come and go through the real scheduler."""

import asyncio
import socket
import statistics
from collections import Counter
from dataclasses import dataclass, field

import pytest

from agent.reconcile import GRACE, PERIOD
from tests.peers.lab.cluster import ACCOUNT
from tests.peers.lab.faces import answers
from tests.peers.lab.grants import (
    ONLY_LEDGER,
    disagreement,
    expected_inside,
    lost,
    oversold,
    rows,
    seen_inside,
)
from tests.peers.lab.identities import NODE_USER
from tests.peers.lab.node_state import until_allocatable, until_unlocked
from tests.peers.lab.placement import ALL_HEALTHY, REGISTERED, agent_said, until_kubelet_says, wall
from tests.peers.lab.pods import a_telling_pod, lives_of, run
from tests.peers.lab.requests import refused
from tests.peers.lab.space import until, until_answer
from tests.peers.lab.stream import Gap, Stream, a_chance, is_blind
from tests.peers.lab.table import FAR_STARTING

KILLS = 20
LEAST_RAN = KILLS // 2
"""Pods that run beside them: before every other kill one is waited for."""


@dataclass
class Harm:
    """What killing has done. `missing` and `oversold` should be empty."""

    gaps: list[Gap] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    """Seconds from each start to the kubelet's having the list again."""
    missing: list[str] = field(default_factory=list)
    oversold: dict[str, tuple[int, int, int]] = field(default_factory=dict)


async def kill_and_start(cluster, agent, harm):
    """SIGKILL, and start again at once."""
    killed = wall()
    await agent.part.kill()
    harm.missing += lost(cluster)
    started = wall()
    await agent.part.start()
    served = await until_kubelet_says(cluster, ALL_HEALTHY, since=started)
    await until(
        lambda: bool(agent_said(agent, "pods.listed", started)),
        20.0,
        lambda: "the agent knows no pods",
    )
    harm.gaps.append(Gap(killed, served, agent_said(agent, "pods.listed", started)[0]))
    harm.delays.append(served - started)
    harm.oversold |= oversold(cluster)


async def a_bad_moment(cluster, chance):
    """Some time, or shortly after the next pod was bound: its Allocate is near then."""
    if chance.random() < 0.4:
        await asyncio.sleep(chance.uniform(0.2, 2.5))
        return
    seen = bound(cluster)
    await cluster.pods.until(lambda: bound(cluster) - seen, 60.0, "no pod is bound any more")
    await asyncio.sleep(chance.uniform(0.0, 0.12))


def bound(cluster):
    """The pods that have a node."""
    return {key for key, pod in cluster.pods.objects.items() if "nodeName" in pod["spec"]}


async def kill_often(cluster, agent, stream):
    """Kill it at bad moments; before every other one a pod runs, as where systemd rests a while."""
    harm = Harm()
    async with asyncio.TaskGroup() as group:
        group.create_task(stream.run())
        for number in range(KILLS):
            if number % 2:
                await stream.until_one_ran()
            await a_bad_moment(cluster, stream.chance)
            await kill_and_start(cluster, agent, harm)
        stream.is_over = True
    return harm


@pytest.mark.timeout(1200)  # longer than what is waited for inside, which tells more
@pytest.mark.parametrize("user", [ACCOUNT, pytest.param(NODE_USER, marks=pytest.mark.long)])
async def test_an_agent_that_is_killed_at_any_moment_loses_nothing(cluster, table, user):
    mark = cluster.plane.audit.mark()
    agent = await cluster.start_registered_agent(user=user)
    residents = await run(
        cluster, *(a_telling_pod(cluster, f"resident-{number}") for number in range(2))
    )
    before = lives_of(cluster, residents)
    stream = Stream(cluster, a_chance())
    harm = await kill_often(cluster, agent, stream)
    ended = wall()

    note(table, stream, harm)
    assert ([], [], {}) == (harm.missing, stream.wrong, harm.oversold)
    assert before == lives_of(cluster, residents)
    assert [] == [one for one in stream.rejected if not any(g.explains(one) for g in harm.gaps)]
    assert LEAST_RAN <= len(stream.ran)
    blind = [one.message for one in stream.rejected if is_blind(one.message)]
    print(blind)  # noqa: T201 -- shown with a failure
    what = "pods rejected in these gaps by an agent that knew no pods yet"
    table.hold(what, len(blind), 0, unit="")
    await until_unlocked(cluster)
    table.hold("20 kills are over → lock free", wall() - ended, 5.0)
    await until_answer(lambda: agrees(cluster, stream), 300.0, lambda: "ledger and kubelet differ")
    table.hold("20 kills are over → ledger agrees with the kubelet", wall() - ended, 60.0)
    assert [] == lost(cluster)
    assert [] == refused(cluster.plane.audit.since(mark, user))


def note(table, stream, harm):
    """The figures of the kills."""
    table.add("pods that ran beside 20 kills of the agent", len(stream.ran), unit="")
    table.add("pods rejected in the gaps of 20 kills", len(stream.rejected), unit="")
    what = "agent starts after SIGKILL → 80 slices at the kubelet"
    # The worst of 20 starts beside two streams of pods says more of the machine than of the agent.
    table.add(f"{what}, worst of 20", max(harm.delays), 0.5)
    table.hold(f"{what}, median", statistics.median(harm.delays), 0.5, far=FAR_STARTING)


async def agrees(cluster, stream):
    """Whether the ledger says what the kubelet says, but for rows of pods that went just now."""
    ledger = rows(cluster)
    differences = await disagreement(cluster)
    return all(
        words == ONLY_LEDGER
        and wall() - stream.deleted[ledger[container].key.pod_uid] < GRACE + PERIOD + 2.0
        for container, words in differences.items()
    )


# Whoever of the node starts again, running containers notice nothing and new ones get theirs.


async def until_socket(cluster, before):
    """When the kubelet made its socket anew, in Unix seconds."""
    path = cluster.kubelet.plugins / "kubelet.sock"
    born = before

    def is_new():
        nonlocal born
        try:
            born = path.stat().st_ctime_ns  # the removal of the old one changes it too
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return born != before

    await until(is_new, 20.0, cluster.kubelet.part.tail)
    return born / 1e9


async def test_a_new_kubelet_finds_the_agent_at_once_and_asks_for_nobody_again(
    cluster, agent, table
):
    residents = await run(
        cluster,
        *(a_telling_pod(cluster, f"resident-{number}") for number in range(2)),
        a_telling_pod(cluster, "resident-2", gpus=2),
    )
    before, asked = lives_of(cluster, residents), answers(agent)

    for turn in range(3):
        old = (cluster.kubelet.plugins / "kubelet.sock").stat().st_ctime_ns
        await cluster.kubelet.part.kill()
        await cluster.kubelet.part.start()
        born = await until_socket(cluster, old)
        registered = await until_kubelet_says(cluster, REGISTERED, since=born)
        await until_allocatable(cluster)
        back = wall()
        table.hold("new kubelet.sock → Register call", registered - born, 0.3)
        table.hold("new kubelet.sock → 80 slices allocatable", back - born, 1.0)
        await run(cluster, a_telling_pod(cluster, f"new-{turn}", gpus=1 + turn % 2))
        assert expected_inside(cluster, f"new-{turn}") == await seen_inside(cluster, f"new-{turn}")

    assert before == lives_of(cluster, residents)
    assert asked + once("new-0", "new-1", "new-2") == answers(agent)


def once(*names):
    """The answers to those pods: one each."""
    return Counter((name, "main") for name in names)
