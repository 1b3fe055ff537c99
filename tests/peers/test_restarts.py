"""Whoever of the node starts again, running containers notice nothing and new ones get theirs."""

import asyncio
import random
import secrets
import statistics
from collections import Counter
from dataclasses import dataclass

import pytest
import pytest_asyncio

from agent.core.errors import Gate
from agent.core.reconcile import VANISHED_GRACE
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.agreement import ONLY_LEDGER, disagreement, lost, rows
from tests.peers.lab.clockwork import (
    ALL_HEALTHY,
    REGISTERED,
    agent_said,
    kubelet_said,
    until_kubelet_says,
    wall,
)
from tests.peers.lab.gpu_pods import (
    answers,
    environment_of,
    forget_told,
    has_its_limits,
    kill_main,
    lives_of,
    oversold,
    processes,
    run,
    until_running,
    until_told,
)
from tests.peers.lab.placement import lock_text
from tests.peers.lab.stream import Stream
from tests.peers.lab.waiting import until, until_answer
from tests.peers.lab.workloads import a_container, a_pod, telling, told_mounts


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _nothing_told(cluster):
    forget_told(cluster)


def a_telling_pod(cluster, name, **kinds):
    return telling(a_pod(name, a_container(**kinds)), cluster.root / "told")


async def until_socket(cluster, before):
    """When the kubelet made its socket anew, in Unix seconds."""
    path = cluster.kubelet.plugins / "kubelet.sock"

    def is_new():
        return path.exists() and path.stat().st_ctime_ns != before

    await until(is_new, 20.0, cluster.kubelet.part.tail)
    return path.stat().st_ctime


async def until_allocatable(cluster, slices=80):
    """Return when the kubelet offers so many slices; when that was, in Unix seconds."""

    async def is_back():
        try:
            return slices == len(await cluster.kubelet.allocatable(RESOURCE))
        except OSError:
            return False

    await until_answer(is_back, 10.0, cluster.kubelet.part.tail)
    return wall()


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
        registered = await until_kubelet_says(cluster, REGISTERED, born)
        back = await until_allocatable(cluster)
        table.add("new kubelet.sock → Register call", registered - born, 0.3)
        table.add("new kubelet.sock → 80 slices allocatable", back - born, 1.0)
        await run(cluster, a_telling_pod(cluster, f"new-{turn}", gpus=1 + turn % 2))
        assert await has_its_limits(cluster, f"new-{turn}")

    assert before == lives_of(cluster, residents)
    assert asked + once("new-0", "new-1", "new-2") == answers(agent)


def once(*names):
    """The answers to those pods: one each."""
    return Counter((name, "main") for name in names)


KILLS = 20
UNKNOWN_PODS = f"[{Gate.PODS_UNKNOWN.value}]"


@dataclass(frozen=True)
class Gap:
    """A time without the agent, in Unix seconds: until the kubelet had its list again."""

    start: float
    end: float
    known: float
    """Until the new agent knew the pods of the node."""

    def explains(self, cluster, one):
        """Whether the kubelet took up and rejected a pod in it."""
        said = f'"SyncLoop ADD" source="api" pods=["default/{one.name}"]'
        taken = kubelet_said(cluster, said, 0.0)[0]
        end = self.known if UNKNOWN_PODS in one.message else self.end
        return taken <= end and self.start <= one.at


async def kill_and_start(cluster, agent):
    """SIGKILL, and start again at once; what was lost then, and the gap."""
    killed = wall()
    await agent.part.kill()
    found = lost(cluster)
    started = wall()
    await agent.part.start()
    served = await until_kubelet_says(cluster, ALL_HEALTHY, started)
    await until(
        lambda: bool(agent_said(agent, "pods.listed", started)),
        20.0,
        lambda: "the agent knows no pods",
    )
    return found, started, Gap(killed, served, agent_said(agent, "pods.listed", started)[0])


def a_chance():
    """Another one each time; its seed is shown with a failure."""
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")  # noqa: T201 -- as said
    return random.Random(seed)  # noqa: S311 -- moments, no secrets


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


@pytest.mark.timeout(400)
async def test_an_agent_that_is_killed_at_any_moment_loses_nothing(cluster, agent, table):
    chance = a_chance()
    residents = await run(
        cluster, *(a_telling_pod(cluster, f"resident-{number}") for number in range(2))
    )
    before = lives_of(cluster, residents)
    stream = Stream(cluster, cluster.root / "told", chance)
    gaps, delays, missing, over = [], [], [], {}
    async with asyncio.TaskGroup() as group:
        group.create_task(stream.run())
        for _ in range(KILLS):
            await a_bad_moment(cluster, chance)
            found, started, gap = await kill_and_start(cluster, agent)
            gaps.append(gap)
            delays.append(gap.end - started)
            missing += found
            over |= oversold(cluster)
        stream.is_over = True
    ended = wall()

    assert ([], [], {}) == (missing, stream.wrong, over)
    assert before == lives_of(cluster, residents)
    outside = [one for one in stream.rejected if not any(g.explains(cluster, one) for g in gaps)]
    assert [] == outside
    await cluster.nodes.until(lambda: lock_text(cluster) is None, 30.0, "the lock is still held")
    table.add("20 kills are over → lock free", wall() - ended, 5.0)
    await until_answer(lambda: agrees(cluster, stream), 120.0, lambda: "ledger and kubelet differ")
    table.add("20 kills are over → ledger agrees with the kubelet", wall() - ended, 60.0)
    assert [] == lost(cluster)
    table.add(
        "agent starts after SIGKILL → 80 slices at the kubelet, worst of 20", max(delays), 0.5
    )
    table.add(
        "agent starts after SIGKILL → 80 slices at the kubelet, median",
        statistics.median(delays),
        0.5,
    )
    table.add("pods that ran beside 20 kills of the agent", len(stream.ran), unit="")
    table.add("pods rejected in the gaps of 20 kills", len(stream.rejected), unit="")
    blind = sum(UNKNOWN_PODS in one.message for one in stream.rejected)
    table.add("of these by an agent that knew no pods yet", blind, 0, unit="")


async def agrees(cluster, stream):
    """Whether the ledger says what the kubelet says, but for rows of pods that went just now."""
    ledger = rows(cluster)
    differences = await disagreement(cluster)
    return all(
        words == ONLY_LEDGER
        and wall() - stream.deleted[ledger[container].key.pod_uid]
        < VANISHED_GRACE.total_seconds() + 2.0
        for container, words in differences.items()
    )


async def test_containerd_may_start_again_under_running_gpu_pods(cluster, agent):
    residents = await run(
        cluster, *(a_telling_pod(cluster, f"resident-{number}") for number in range(3))
    )
    before, asked = lives_of(cluster, residents), answers(agent)
    alive = {name: processes_of(cluster, life) for name, life in before.items()}

    await cluster.runtime.restart()
    await run(cluster, a_telling_pod(cluster, "new", gpus=2))

    assert await has_its_limits(cluster, "new")
    assert before == lives_of(cluster, residents)
    assert alive == {name: processes_of(cluster, life) for name, life in before.items()}
    assert asked + once("new") == answers(agent)
    assert 80 == len(await cluster.kubelet.allocatable(RESOURCE))


def processes_of(cluster, life):
    """The processes of a pod's containers."""
    return {name: processes(cluster, one.id) for name, one in life.items()}


async def test_a_container_whose_record_the_kubelet_lost_starts_as_it_was(cluster, agent, table):
    told = cluster.root / "told"
    names = await run(
        cluster,
        a_telling_pod(cluster, "dies", gpus=2, memory=7000),
        *(a_telling_pod(cluster, f"lives-{number}") for number in range(3)),
    )
    before = lives_of(cluster, names)
    assert await has_its_limits(cluster, "dies")
    environment, mounts = inside(cluster, "dies")

    await cluster.kubelet.restart(lose_checkpoint=True)
    await until_allocatable(cluster)
    (told / "dies.main.done").unlink()
    died = wall()
    kill_main(cluster, before["dies"]["main"].id)
    await run(cluster, a_telling_pod(cluster, "new", memory=500))
    await until_told(told, "dies")
    table.add("container dies, its record lost → it runs again", wall() - died)
    await until_running(cluster, ["dies"])

    assert (environment, mounts) == inside(cluster, "dies")
    assert await has_its_limits(cluster, "dies")
    assert await has_its_limits(cluster, "new")
    after = lives_of(cluster, names)
    assert 1 == after.pop("dies")["main"].restarts
    assert without(before, "dies") == after
    assert ["replay"] == [
        one["result"] for one in agent.events("alloc.answered") if one["pod"] == "dies"
    ][1:]
    assert [] == lost(cluster)


def inside(cluster, name):
    """The environment of a container, byte by byte, and what of the agent is mounted where."""
    told = cluster.root / "told"
    mounts = {
        place: source
        for place, source in told_mounts(told, name).items()
        if "vgpu" in source or "ld.so.preload" in place
    }
    assert any(source.endswith("_main") for source in mounts.values())
    return environment_of(cluster, name), mounts


def without(mapping, key):
    """The mapping less one key."""
    return {one: value for one, value in mapping.items() if one != key}
