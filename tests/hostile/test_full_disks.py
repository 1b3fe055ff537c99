"""A container fills the file system that its directory lies on, with bytes or with inodes.

That it can is said in SECURITY.md, and what it costs: new pods wait or are refused with a sentence,
what runs goes on, and all is well soon after there is room.
"""

import asyncio
import re
import statistics

import pytest

from agent.sandbox.scenario.facts import answers, ledger_on_disk
from tests.hostile.lab.attackers import AttackTally, attacker
from tests.hostile.lab.disks import is_full
from tests.hostile.lab.node import Node, Small, Tenant, open_node
from tests.hostile.lab.siege import Attack, Round, Siege
from tests.hostile.lab.snapshot import changed, snapshot
from tests.hostile.lab.table import AttackTable
from tests.process.agent_process import comes, offers

MIB, INODES = 48, 3_000
TRIED = 3
"""Pods that come while it is full."""
SENTENCE = re.compile(r"[A-Z].*\[(HA-500[13])\]")
SOON = 30.0
ONE = 3.0
"""Seconds until a pod is served again, and for one try."""


@pytest.mark.parametrize(
    ("program", "what", "holds"),
    [
        ("space", "disk of the hook path full", ("hook",)),
        ("inodes", "inodes of the hook path used up", ("hook",)),
        ("space", "disk of hook path and state full", ("hook", "state")),
        ("inodes", "inodes of hook path and state gone", ("hook", "state")),
    ],
)
async def test_what_a_container_fills_stops_new_pods_alone_and_until_there_is_room(
    table: AttackTable, program: str, what: str, holds: tuple[str, ...]
):
    attack = Attack(what, "12", 1_000_000_000, 60.0)
    async with open_node(small=Small(MIB, INODES, holds)) as node:
        siege, tally = Siege(node, table), AttackTally()
        with siege.noted(attack, tally):
            usual = await siege.usual()
            before = snapshot(node.cluster.places, node.neighbour)
            tenant = await node.tenant("tenant")
            where = (tenant.directory, program, *attack.bounds)
            async with attacker("tenant", *where) as filling:
                assert await comes(lambda: is_full(node.containers))
                said = await while_full(node)
                await node.is_alive()
                tally.add(await filling.stopped())
            freed(tenant)
            seconds = await until_served(node)
            after = await siege.usual()
            found = changed(before, snapshot(node.cluster.places, node.neighbour))
            assert not found, found
            assert [] == node.sums.problems
            assert 0 < tally.facts["full"]
        tally.remark = f"new pods: {said}; served {seconds:.0f} s after there was room"
        round_ = Round(statistics.median(usual), statistics.median(after), max(after))
        siege.note(attack, tally, round_, f"ok{tally.told()}")


async def while_full(node: Node) -> str:
    """New pods are served, wait or are refused with a sentence; what runs goes on, also when the
    agent and the kubelet are new. Returns what became of the new ones."""
    cluster, agent = node.cluster, node.agent
    given = answers(cluster)
    said = dict.fromkeys([await outcome(node) for _ in range(TRIED)])
    assert agent == node.agent

    rows = {row.key for row in ledger_on_disk(cluster).rows}
    await cluster.kill_agent()
    assert await offers(cluster, 0)
    await cluster.start_agent()
    assert await cluster.until(lambda: bool(cluster.web_address), 20), cluster.log.last(20)
    assert rows <= {row.key for row in ledger_on_disk(cluster).rows}
    await cluster.kubelet.restart()
    assert {**answers(cluster), **given} == answers(cluster)
    return ", ".join(said)


async def outcome(node: Node) -> str:
    """What became of one new pod, in a word."""
    why = await node.pods.tried()
    await node.is_alive()
    if not why:
        return "served"
    if told := SENTENCE.search(why):
        return told[1]
    assert node.cluster.log.of("slices.withheld"), why
    return "wait"


def freed(tenant: Tenant) -> None:
    """The container's owner removes what it has written."""
    for path in tenant.directory.iterdir():
        path.unlink()


async def until_served(node: Node) -> float:
    """Seconds until a new pod is served again."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(SOON):
        while await node.pods.tried(ONE):
            await node.is_alive()
    return loop.time() - began
