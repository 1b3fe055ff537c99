"""Other users of the node, and who reaches the web port. tests/doors has what they say there."""

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import pytest

from tests.hostile.lab.attackers import AttackTally, at_work
from tests.hostile.lab.siege import Attack, Begin, Siege
from tests.hostile.lab.working import NOBODY


def by_a_user(uid: int, attack: Attack, program: str, paths: Iterable[Path]) -> Begin:
    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        async with at_work(tally, "stranger", f"{uid}", program, *attack.bounds, *paths):
            yield

    return begin


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


# Who reaches the web port, or is a user of the node: floods, garbage, and words that act.

CROWD = 600.0
"""Connections a second, so that 1,000 are open before half of the pods are served. A machine that
does nothing but connect is no test of the agent."""


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


async def test_actions_of_another_user_do_nothing(siege: Siege):
    attack = Attack("actions by another user", "20", 5_000, 30.0, 100.0)

    with web_opened_to_all(siege.node.roots_door):
        tally = await siege.withstand(attack, by_a_client(siege, attack, "actions"))

    assert 0 < tally.facts["answered"]
    assert 0 == tally.facts["acted"]


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
