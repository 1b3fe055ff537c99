"""What a user of the node does before an agent starts: it starts all the same, and serves."""

import contextlib
import statistics

import pytest

from tests.hostile.lab.attackers import AttackTally, at_work
from tests.hostile.lab.node import Node, open_node
from tests.hostile.lab.siege import Attack, Round, Siege
from tests.hostile.lab.table import AttackTable
from tests.hostile.lab.working import NOBODY
from tests.peers.lab.ports import free_ports
from tests.process.agent_process import PATIENCE, comes, offers

LOUD = 20_000.0


async def test_who_tries_to_hold_the_lock_keeps_no_agent_from_starting(table: AttackTable):
    attack = Attack("the lock held by another user", "1", 5_000_000, 60.0, LOUD)
    async with open_node(web_port=free_ports(1)[0]) as node:
        siege, tally, lock = Siege(node, table), AttackTally(), node.cluster.places.run / "lock"
        lock.parent.chmod(0o755)
        with siege.noted(attack, tally):
            usual = await siege.usual()
            where = (f"{NOBODY}", "reads", *attack.bounds, lock)
            async with at_work(tally, "stranger", *where):
                await until_the_next_serves(node)
                during = await node.pods.row(node.is_alive)
            assert 0 == tally.facts["got"]
        round_ = Round(statistics.median(usual), statistics.median(during), max(during))
        siege.note(attack, tally, round_, "ok, the next agent took over")


async def until_the_next_serves(node: Node) -> None:
    """One agent waits behind the other, which is killed."""
    cluster = node.cluster
    first, second = cluster.agent, await cluster.start_agent()
    waits = await cluster.until(lambda: bool(cluster.log.of("lock.standby")), PATIENCE)
    assert waits, cluster.log.last(20)
    await first.kill()
    serves = await cluster.until(
        lambda: bool(cluster.log.of("registration.serving", second.pid)), PATIENCE
    )
    assert serves, cluster.log.last(20)
    assert await offers(cluster, node.slices), cluster.log.last(20)


async def test_who_squats_the_web_port_keeps_no_agent_from_serving(table: AttackTable):
    attack = Attack("the web port squatted", "21", 1_000_000, 60.0)
    tally, port = AttackTally(), free_ports(1)[0]
    async with contextlib.AsyncExitStack() as stack:
        squatter = at_work(tally, "webber", f"{NOBODY}", "squats", *attack.bounds, f"{port}")
        await stack.enter_async_context(squatter)
        node = await stack.enter_async_context(open_node(web_port=port))
        siege = Siege(node, table)
        with siege.noted(attack, tally):
            assert await comes(node.roots_door.is_socket)
            during = await node.pods.row(node.is_alive_for_root)
            with pytest.raises((ConnectionError, TimeoutError)):
                await node.is_alive()
    round_ = Round(0, statistics.median(during), max(during))
    siege.note(attack, tally, round_, "ok, the unix socket answers")
