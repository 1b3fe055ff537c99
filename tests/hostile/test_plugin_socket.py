"""Who comes to the plugin's socket and to the agent's files: other users, and callers who flood."""

import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from tests.hostile.lab.attackers import AttackTally, at_work
from tests.hostile.lab.siege import Attack, Begin, Siege
from tests.hostile.lab.working import NOBODY

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


async def test_another_user_of_the_node_changes_nothing(siege: Siege):
    attack = Attack("files changed by another user", "1 3 9 11 15", 500_000, 30.0, 20_000)
    root = siege.node.cluster.places.root

    tally = await siege.withstand(attack, by_a_user(NOBODY, attack, "trespasses", [root]))

    assert 0 == tally.facts["got"]


async def test_another_user_of_the_node_reads_no_secret_and_holds_no_lock(siege: Siege):
    attack = Attack("state, token and lock opened", "1 25", 500_000, 30.0, 20_000)
    places = siege.node.cluster.places
    paths = [places.kubeconfig, *places.state.iterdir(), *places.run.iterdir()]
    assert 3 < len(paths)

    tally = await siege.withstand(attack, by_a_user(NOBODY, attack, "reads", paths))

    assert 0 == tally.facts["got"]


@pytest.mark.parametrize(
    ("program", "what", "most", "rate"),
    [
        ("noise", "noise at the plugin's socket", 5_000, 50.0),
        ("bombs", "headers that swell", 2_000, 20.0),
        ("idles", "800 silent connections", 20_000, LOUD),
        ("ids", "requests of 10,000 ids", 500, 5.0),
    ],
)
async def test_a_caller_whom_the_socket_lets_in_holds_up_nobody(
    siege: Siege, program: str, what: str, most: int, rate: float
):
    attack = Attack(what, "8 27", most, 30.0, rate)

    await siege.withstand(attack, by_a_user(0, attack, program, [siege.node.socket]))
