"""What root in a container does to its directory: while it runs, and when it is gone."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from tests.hostile.lab.attackers import Tally, at_work, finished
from tests.hostile.lab.siege import Attack, Begin, Siege


def by_a_tenant(siege: Siege, attack: Attack, program: str, *words: str | Path) -> Begin:
    """A container that runs does it, until it is stopped; then its pod is deleted."""

    @contextlib.asynccontextmanager
    async def begin(tally: Tally) -> AsyncIterator[None]:
        async with siege.a_tenant() as directory:
            async with at_work(tally, "tenant", directory, program, *attack.bounds, *words):
                yield

    return begin


def left_behind(siege: Siege, attack: Attack, program: str, *words: str | Path) -> Begin:
    """A container has done it, and is gone: the attack is what the agent has to remove."""

    @contextlib.asynccontextmanager
    async def begin(tally: Tally) -> AsyncIterator[None]:
        async with siege.a_tenant() as directory:
            await finished(tally, "tenant", directory, program, *attack.bounds, *words)
        yield
        await siege.until_removed()

    return begin


async def test_a_tenant_that_closes_and_gives_away_its_directory_holds_up_nobody(siege):
    attack = Attack("own directory closed, given away", "10 11", 100_000, 20.0, 2_000)

    await siege.withstand(attack, by_a_tenant(siege, attack, "modes"))


async def test_many_files_of_a_pod_that_is_gone_hold_up_nobody(siege, many):
    attack = Attack(f"{many:,} files left behind", "10 12", many, 60.0)

    await siege.withstand(attack, left_behind(siege, attack, "files"))
