"""An agent that is killed again and again, while pods come and go through the real scheduler."""

import asyncio
import contextlib
import random
import re
import secrets
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import pytest

from agent.cluster import Role
from agent.errors import RefusalReason, StateCorrupt
from agent.reconcile import GRACE, PERIOD
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.control import NODE_USER
from tests.peers.lab.part import because, until, until_answer
from tests.peers.lab.pods import (
    ALL_HEALTHY,
    PODS,
    REGISTERED,
    a_container,
    a_pod,
    agent_said,
    key,
    lives,
    phase_of,
    wall,
)
from tests.peers.lab.running import ACCOUNT, refused
from tests.peers.lab.servers import EVENTS
from tests.peers.lab.table import FAR_STARTING

# Times without an agent, and which rejections of pods belong into them.

TOLD_LATE: Final = 20.0
"""Seconds after which a rejection is in the API for sure: the kubelet tells at once, but where that
went wrong only ten seconds later. What belongs into a gap is judged by when the pod was taken."""

STARTING: Final = 2.0
"""Seconds for which an agent that knows its pods is still busy with its start."""

_UNREACHED: Final = r"rpc error: code = (Unavailable|Canceled) desc = (?!.*\[HA-).*"
_KUBELETS_OWN: Final = (
    re.escape(because(f"no healthy devices present; cannot allocate unhealthy devices {RESOURCE}")),
    because(f"(device plugin GetPreferredAllocation rpc failed with err: )?{_UNREACHED}"),
    f"Pod was rejected: Node didn't have enough resource: {RESOURCE}, .*",
)
"""What it says where nobody answers it."""


_OF_STARTS: Final = (RefusalReason.OUT_OF_TIME, RefusalReason.STARVED)
"""An agent may say so that was just started."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A pod that the kubelet did not take.

    `taken` and `at` in Unix seconds: when the kubelet began with it, and when the watch showed it.
    """

    name: str
    taken: float
    at: float
    message: str

    @property
    def is_blind(self) -> bool:
        """Whether an agent speaks that does not know the pods of its node yet."""
        return f"[{RefusalReason.PODS_UNKNOWN.value}]" in self.message


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without the agent, in Unix seconds: until the kubelet had its list again."""

    start: float
    end: float
    known: float
    """Until the new agent knew the pods of the node."""

    def explains(self, one: Rejected) -> bool:
        """Whether the kubelet took up and rejected a pod in it, in words that belong there."""
        if one.is_blind:
            end = self.known
        elif any(f"[{reason.value}]" in one.message for reason in _OF_STARTS):
            end = max(self.known, self.end) + STARTING
        elif any(re.fullmatch(text, one.message) for text in _KUBELETS_OWN):
            end = self.end
        else:
            return False
        return one.taken <= end and self.start <= one.at <= end + TOLD_LATE


DECIDED_WITHIN: Final = 90.0
"""Seconds until one more pod has run: the scheduler places them one at a time."""
_SHAPES: Final = ((1,), (1,), (2,), (1, 1))
"""How many GPUs each container of a pod asks for."""
_LASTS: Final = (0.2, 3.0)


@dataclass(eq=False, slots=True)
class Stream:
    """What became of the pods. `wrong`: sentences about what should not have been seen."""

    cluster: Cluster
    chance: random.Random
    is_over: bool = False
    ran: list[str] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    deleted: dict[str, float] = field(default_factory=dict)
    """When the pods with these UIDs were gone, in Unix seconds."""
    _count: int = 0

    async def run(self) -> None:
        """One pod after the other, until it is over and the last one is gone."""
        while not self.is_over:
            self._count += 1
            await self._live(f"stream-{self._count}")

    async def until_one_ran(self) -> None:
        """Return once one more pod has run to its end. Raises TimeoutError."""
        before = len(self.ran)
        await until(lambda: len(self.ran) > before, DECIDED_WITHIN, lambda: f"{self.rejected}")

    async def _live(self, name: str) -> None:
        cluster, created = self.cluster, wall()
        containers = [
            a_container(f"c{place}", gpus=gpus, memory=1000 + 10 * self._count, cores=3)
            for place, gpus in enumerate(self.chance.choice(_SHAPES))
        ]
        await cluster.nodes.until_current()
        telling = cluster.telling(a_pod(name, *containers))
        pod = await cluster.decided(await cluster.api.create(PODS, telling))
        if phase_of(pod) == "Failed":
            at = wall()
            words = '"SyncLoop ADD"', f'"{key(name)}"'
            taken = await cluster.until_kubelet_says(*words, since=created)
            self.rejected.append(Rejected(name, taken, at, pod["status"].get("message", "")))
            await asyncio.sleep(self.chance.uniform(*_LASTS))  # or a gap would fill with them
        else:
            await self._look_inside(name)
        await cluster.delete(name, grace=0)
        await cluster.until_deleted(name)
        self.deleted[pod["metadata"]["uid"]] = wall()

    async def _look_inside(self, name: str) -> None:
        """Whether it runs with its limits, and goes on so while it lasts."""
        before = lives(self.cluster.as_seen(name))
        wanted, seen = self.cluster.expected_inside(name), await self.cluster.seen_inside(name)
        if wanted != seen:
            self.wrong.append(f"{name} was promised {wanted} and sees {seen}")
        await asyncio.sleep(self.chance.uniform(*_LASTS))
        after = lives(self.cluster.as_seen(name))
        if before != after:
            self.wrong.append(f"{name} was {before} and is {after}")
        self.ran.append(name)


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
    harm.missing += cluster.lost()
    started = wall()
    await agent.part.start()
    served = await cluster.until_kubelet_says(ALL_HEALTHY, since=started)
    await until(
        lambda: bool(agent_said(agent, "pods.listed", started)),
        20.0,
        lambda: "the agent knows no pods",
    )
    harm.gaps.append(Gap(killed, served, agent_said(agent, "pods.listed", started)[0]))
    harm.delays.append(served - started)
    harm.oversold |= cluster.oversold()


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
        for _ in range(2):
            group.create_task(stream.run())
        for number in range(KILLS):
            if number % 2:
                await stream.until_one_ran()
            await a_bad_moment(cluster, stream.chance)
            await kill_and_start(cluster, agent, harm)
        stream.is_over = True
    return harm


async def a_few(cluster):
    """Telling pods of several shapes, which run and are settled; their names."""
    several = (a_container("left"), a_container("plain", gpus=0), a_container("right", cores=20))
    load = (a_container("load", script="true"),) if cluster.release.serves_inits else ()
    names = await cluster.run(
        cluster.a_telling_pod("pair", gpus=2),
        cluster.telling(a_pod("trio", *several)),
        cluster.telling(a_pod("prepared", a_container(memory=2048), inits=load)),
        within=60.0,
    )
    await cluster.until_settled(*names)
    await cluster.until_told(*names)
    return names


@pytest.mark.timeout(1200)  # longer than what is waited for inside, which tells more
@pytest.mark.parametrize("user", [ACCOUNT, pytest.param(NODE_USER, marks=pytest.mark.long)])
async def test_an_agent_that_is_killed_at_any_moment_loses_nothing(cluster, table, user):
    mark = cluster.plane.audit.mark()
    agent = await cluster.start_registered_agent(user=user)
    residents = await cluster.run(
        cluster.a_telling_pod("resident-0"), cluster.a_telling_pod("resident-1", gpus=2)
    )
    before = cluster.lives_of(residents)
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")  # noqa: T201 -- shown with a failure
    stream = Stream(cluster, random.Random(seed))  # noqa: S311 -- moments, no secrets
    harm = await kill_often(cluster, agent, stream)
    ended = wall()

    note(table, stream, harm)
    assert ([], [], {}) == (harm.missing, stream.wrong, harm.oversold)
    assert before == cluster.lives_of(residents)
    assert [] == [one for one in stream.rejected if not any(g.explains(one) for g in harm.gaps)]
    assert LEAST_RAN <= len(stream.ran)
    blind = [one.message for one in stream.rejected if one.is_blind]
    print(blind)  # noqa: T201 -- shown with a failure
    what = "pods rejected in these gaps by an agent that knew no pods yet"
    table.hold(what, len(blind), 0, unit="")
    await cluster.until_unlocked()
    table.hold("20 kills are over → lock free", wall() - ended, 5.0)
    await until_answer(lambda: agrees(cluster, stream), 300.0, lambda: "ledger and kubelet differ")
    table.hold("20 kills are over → ledger agrees with the kubelet", wall() - ended, 60.0)
    assert [] == cluster.lost()
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
    held, rows = await cluster.kubelet.held(RESOURCE), cluster.rows()
    left = [row for container, row in rows.items() if container not in held]
    return (
        held.keys() <= rows.keys()
        and all(rows[one].confirmed and {*rows[one].slice_ids} == held[one] for one in held)
        and all(wall() - stream.deleted[row.key.pod_uid] < GRACE + PERIOD + 2.0 for row in left)
    )


# The agent's state is lost: rows come back from annotations and the kubelet.


def listed(cluster):
    """Of each row whose container PodResources lists, what must come back; none: no state yet."""
    with contextlib.suppress(FileNotFoundError, StateCorrupt):
        return {
            who: (row.shares, row.slice_ids, row.group, row.edits, row.confirmed)
            for who, row in cluster.rows().items()
            if row.role is not Role.INIT
        }
    return {}


async def test_rows_of_running_pods_come_back_and_the_pods_notice_nothing(cluster, agent, table):
    names = await a_few(cluster)
    await until(
        lambda: all(row.confirmed for row in cluster.rows().values()), 20.0, agent.part.tail
    )
    before, wanted = cluster.lives_of(names), listed(cluster)

    await agent.part.kill()
    for path in (cluster.space.view / "var/lib/hami-agent").glob("state*.json"):
        path.write_bytes(b"\0" * path.stat().st_size)
    began = wall()
    await agent.part.start()
    await until(lambda: wanted == listed(cluster), 120.0, lambda: f"{listed(cluster)}")
    table.hold("state lost: agent starts → rows are back", wall() - began, 5.0)

    await cluster.until_allocatable()
    await cluster.run(cluster.a_telling_pod("new"))
    for name in (*names, "new"):
        assert cluster.expected_inside(name) == await cluster.seen_inside(name)
    assert (before, {}) == (cluster.lives_of(names), cluster.oversold())

    async def is_told():
        found = (await cluster.api.get(EVENTS))["items"]
        return any(one["reason"] == "StateRecovered" for one in found)

    await until_answer(is_told, 20.0, agent.part.tail)


# Whoever of the node starts again, running containers notice nothing and new ones get theirs.


async def test_a_new_kubelet_finds_the_agent_at_once_and_asks_for_nobody_again(
    cluster, agent, table
):
    residents = await cluster.run(
        *(cluster.a_telling_pod(f"resident-{number}") for number in range(2)),
        cluster.a_telling_pod("resident-2", gpus=2),
    )
    before, asked = cluster.lives_of(residents), agent.answers()

    for turn in range(3):
        await cluster.kubelet.restart()
        await cluster.until_allocatable()
        back = wall()
        born = (cluster.kubelet.plugins / "kubelet.sock").stat().st_ctime
        registered = await cluster.until_kubelet_says(REGISTERED, since=born)
        table.hold("new kubelet.sock → Register call", registered - born, 0.3)
        table.hold("new kubelet.sock → 80 slices allocatable", back - born, 1.0)
        await cluster.run(cluster.a_telling_pod(f"new-{turn}", gpus=1 + turn % 2))
        assert cluster.expected_inside(f"new-{turn}") == await cluster.seen_inside(f"new-{turn}")

    assert before == cluster.lives_of(residents)
    assert asked + Counter((f"new-{turn}", "main") for turn in range(3)) == agent.answers()


# Which rejections a time without an agent explains: the kubelet's own, and only in that time.

GAP = Gap(start=10.0, end=12.0, known=11.0)
EOF = "rpc error: code = Unavailable desc = error reading from server: EOF"
PREFERENCE = "device plugin GetPreferredAllocation rpc failed with err: "
OWN = because("no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu")
NO_ROOM = (
    "Pod was rejected: Node didn't have enough resource: nvidia.com/gpu, requested: 1, capacity: 0"
)
BLIND = because("rpc error: code = Unavailable desc = The pods are not known yet. [HA-2010]")
OUT_OF_TIME = because(
    "rpc error: code = Unavailable desc = No answer was found within 2 s; create the pod again. "
    "[HA-5002]"
)
NOT_EXPLAINED = (
    "rpc error: code = FailedPrecondition desc = Pod a/b has no lock. [HA-2005]",
    "rpc error: code = Unavailable desc = The driver is silent. [HA-4005]",
    "requested number of devices unavailable for nvidia.com/gpu. Requested: 1",
    "forbidden sysctl",
    "",
)


@pytest.mark.parametrize(
    ("message", "taken", "at", "explained"),
    [
        (OWN, 11.0, 11.5, True),
        (because(EOF), 11.0, 11.5, True),
        (because(f"{PREFERENCE}{EOF}"), 11.0, 11.5, True),
        (NO_ROOM, 11.0, 11.5, True),
        # It came before or after.
        (OWN, 12.1, 12.2, False),
        (OWN, 8.0, 9.9, False),
        (OWN, 11.0, 12.1 + TOLD_LATE, False),
        # An agent is blind only until it knows the pods.
        (OWN, 11.5, 11.5, True),
        (BLIND, 11.0, 11.5, True),
        (BLIND, 11.5, 11.5, False),
        # It may be out of time right after its start only.
        (OUT_OF_TIME, 12.5, 14.6, True),
        (OUT_OF_TIME, 12.1 + STARTING, 16.2, False),
        (OUT_OF_TIME, 9.0, 9.9, False),
        # An agent refused, or nobody can place it.
        *((because(text), 11.0, 11.5, False) for text in NOT_EXPLAINED),
    ],
)
async def test_what_nobody_answered_is_explained_and_nothing_else(message, taken, at, explained):
    assert explained == GAP.explains(Rejected("p", taken, at, message))
