"""Who reaches the web port, or is a user of the node: floods, garbage, and words that act."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.hostile.lab.attackers import AttackTally, at_work
from tests.hostile.lab.siege import Attack, Begin, Siege
from tests.hostile.lab.working import NOBODY

LOUD = 300.0
"""Connections a second."""
CROWD = 1_000.0
"""The same, where they are held: so many are open after a second."""


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
        ("resets", "requests that are reset", LOUD),
        ("deaf", "answers that nobody takes", 50.0),
        ("scrapes", "metrics asked for without end", LOUD),
    ],
)
async def test_who_reaches_the_port_holds_up_neither_pods_nor_probes(
    siege: Siege, program: str, what: str, rate: float
):
    attack = Attack(what, "21", 20_000, 30.0, rate)

    tally = await siege.withstand(attack, by_a_client(siege, attack, program))

    if program in {"slow", "asked", "addresses"}:
        assert 1_000 < tally.facts["held"]


async def test_garbage_is_answered_shortly_and_repeats_nothing(siege: Siege):
    attack = Attack("garbage at the web port", "20 21", 5_000, 30.0, 100.0)

    tally = await siege.withstand(attack, by_a_client(siege, attack, "garbage"))

    assert 0 < tally.facts["answered"]
    assert 0 == tally.facts["wrong"]


async def test_nobody_but_root_does_anything_over_port_or_socket(siege: Siege):
    attack = Attack("actions by another user", "20", 5_000, 30.0, 100.0)

    with opened_to_all(siege.node.roots_door):
        tally = await siege.withstand(attack, by_a_client(siege, attack, "actions"))

    assert 0 < tally.facts["answered"]
    assert 0 == tally.facts["acted"]


async def test_who_fills_the_unix_socket_holds_up_nobody_and_root_is_answered(siege: Siege):
    attack = Attack("the unix socket filled", "21", 20_000, 30.0, LOUD)

    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        async with by_a_client(siege, attack, "crowds")(tally):
            yield
            await siege.node.is_alive_for_root()

    with opened_to_all(siege.node.roots_door):
        await siege.withstand(attack, begin)


@contextlib.contextmanager
def opened_to_all(path: Path) -> Iterator[None]:
    """Even then the kernel says who calls."""
    path.parent.chmod(0o755)
    path.chmod(0o666)
    try:
        yield
    finally:
        path.chmod(0o660)
        path.parent.chmod(0o750)
