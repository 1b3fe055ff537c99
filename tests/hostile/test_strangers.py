"""Who reaches the web port, or is a user of the node: floods, and words that act.

tests/doors has what they say there.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.hostile.lab.siege import Attack, AttackTally, Siege, at_work

NOBODY = 65534


async def attacked(siege: Siege, attack: Attack, program: str, *words: str | Path) -> AttackTally:
    """What came of the attack of this user of the node, which was withstood."""

    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        async with at_work(tally, f"{NOBODY}", program, *attack.bounds, *words):
            yield

    return await siege.withstand(attack, begin)


CROWD = 600.0
"""Connections a second, so that 1,000 are open before half of the pods are served. A machine that
does nothing but connect is no test of the agent."""


@pytest.mark.parametrize(
    ("program", "what", "rate"),
    [
        ("slow", "1,000 slow connections", CROWD),
        ("asked", "1,000 that have each asked once", CROWD),
        ("addresses", "slow ones from 400 addresses", CROWD),
        ("deaf", "answers that nobody takes", 50.0),
    ],
)
async def test_who_reaches_the_port_holds_up_neither_pods_nor_probes(siege, program, what, rate):
    attack = Attack(what, "21", 20_000, 30.0, rate)

    tally = await attacked(siege, attack, program, siege.node.port)

    assert program == "deaf" or 1_000 < tally.facts["held"]


async def test_actions_of_another_user_do_nothing(siege: Siege):
    """Also where everybody may open the socket: the kernel says who calls."""
    attack = Attack("actions by another user", "20", 5_000, 30.0, 100.0)
    door = siege.node.cluster.places.run / "api.sock"
    door.parent.chmod(0o755)
    door.chmod(0o666)
    try:
        tally = await attacked(siege, attack, "actions", siege.node.port, door)
    finally:
        door.chmod(0o660)
        door.parent.chmod(0o750)

    assert 0 < tally.facts["answered"]
    assert 0 == tally.facts["acted"]
