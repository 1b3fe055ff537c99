"""Who comes to the plugin's socket and to the agent's files: other users, and callers who flood."""

import contextlib
import statistics
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import pytest

from tests.hostile.lab.attackers import AttackTally, at_work
from tests.hostile.lab.node import Node, open_node
from tests.hostile.lab.siege import Attack, AttackTable, Begin, Round, Siege
from tests.hostile.lab.working import NOBODY
from tests.peers.lab.identities import free_ports
from tests.process.agent_process import PATIENCE, comes, offers

LOUD = 300.0
"""Connections a second. A machine that does nothing but connect is no test of the agent."""


def by_a_user(uid: int, attack: Attack, program: str, paths: Iterable[Path]) -> Begin:
    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        async with at_work(tally, "stranger", f"{uid}", program, *attack.bounds, *paths):
            yield

    return begin


async def test_another_user_of_the_node_is_hung_up_on(siege: Siege):
    attack = Attack("Allocate by another user", "1", 20_000, 30.0, LOUD)
    path = siege.node.socket
    begin = by_a_user(NOBODY, attack, "knocks", [path])

    with opened_to_all(path):
        tally = await siege.withstand(attack, begin)

    assert (0, tally.tries) == (tally.facts["got"], tally.facts["hung_up"])


@contextlib.contextmanager
def opened_to_all(path: Path):
    """Even then the kernel says who calls."""
    path.chmod(0o666)
    try:
        yield
    finally:
        path.chmod(0o600)


@pytest.mark.parametrize(
    ("program", "what", "threats"),
    [
        ("trespasses", "files changed by another user", "1 3 9 11 15"),
        ("reads", "state, token and lock opened", "1 25"),
    ],
)
async def test_another_user_of_the_node_changes_nothing(
    siege: Siege, program: str, what: str, threats: str
):
    """Nor does it read a secret or hold the lock."""
    attack = Attack(what, threats, 500_000, 30.0, 20_000)
    places = siege.node.cluster.places
    paths = [places.root]
    if program == "reads":
        paths = [places.kubeconfig, *places.state.iterdir(), *places.run.iterdir()]
        assert 3 < len(paths)

    tally = await siege.withstand(attack, by_a_user(NOBODY, attack, program, paths))

    assert 0 == tally.facts["got"]


@pytest.mark.parametrize(
    ("program", "what", "most", "rate"),
    [
        ("noise", "noise at the plugin's socket", 5_000, 50.0),
        ("bombs", "headers that swell", 2_000, 20.0),
        ("idles", "800 silent connections", 20_000, LOUD),
    ],
)
async def test_a_caller_whom_the_socket_lets_in_holds_up_nobody(
    siege: Siege, program: str, what: str, most: int, rate: float
):
    attack = Attack(what, "8 27", most, 30.0, rate)

    await siege.withstand(attack, by_a_user(0, attack, program, [siege.node.socket]))


# What a user of the node does before an agent starts: it starts all the same, and serves.

LOUD_AT_START = 20_000.0


async def test_who_tries_to_hold_the_lock_keeps_no_agent_from_starting(table: AttackTable):
    attack = Attack("the lock held by another user", "1", 5_000_000, 60.0, LOUD_AT_START)
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


# Who reaches the web port, or is a user of the node: floods, garbage, and words that act.

CROWD = 600.0
"""The same, where they are held: 1,000 are open before half of the pods are served."""


def by_a_client(siege: Siege, attack: Attack, program: str) -> Begin:
    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        where = (f"{siege.node.port}", siege.node.roots_door)
        async with at_work(tally, "webber", f"{NOBODY}", program, *attack.bounds, *where):
            yield

    return begin


@pytest.mark.parametrize(
    ("program", "what", "rate"),
    [
        ("slow", "1,000 slow connections", CROWD),
        ("asked", "1,000 that have each asked once", CROWD),
        ("addresses", "slow ones from 400 addresses", CROWD),
        ("deaf", "answers that nobody takes", 50.0),
    ],
)
async def test_who_reaches_the_port_holds_up_neither_pods_nor_probes(
    siege: Siege, program: str, what: str, rate: float
):
    attack = Attack(what, "21", 20_000, 30.0, rate)

    tally = await siege.withstand(attack, by_a_client(siege, attack, program))

    if program in {"slow", "asked", "addresses"}:
        assert 1_000 < tally.facts["held"]


@pytest.mark.parametrize(
    ("program", "what", "threats"),
    [("garbage", "garbage at the web port", "20 21"), ("actions", "actions by another user", "20")],
)
async def test_garbage_and_actions_are_answered_shortly_and_do_nothing(
    siege: Siege, program: str, what: str, threats: str
):
    attack = Attack(what, threats, 5_000, 30.0, 100.0)

    with web_opened_to_all(siege.node.roots_door):
        tally = await siege.withstand(attack, by_a_client(siege, attack, program))

    assert 0 < tally.facts["answered"]
    assert (0, 0) == (tally.facts["wrong"], tally.facts["acted"])


async def test_who_fills_the_unix_socket_holds_up_nobody_and_root_is_answered(siege: Siege):
    attack = Attack("the unix socket filled", "21", 20_000, 30.0, LOUD)

    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        async with by_a_client(siege, attack, "crowds")(tally):
            yield
            await siege.node.is_alive_for_root()

    with web_opened_to_all(siege.node.roots_door):
        await siege.withstand(attack, begin)


@contextlib.contextmanager
def web_opened_to_all(path: Path) -> Iterator[None]:
    """Even then the kernel says who calls."""
    path.parent.chmod(0o755)
    path.chmod(0o666)
    try:
        yield
    finally:
        path.chmod(0o660)
        path.parent.chmod(0o750)
