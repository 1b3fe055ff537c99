"""What root in a container does to its directory: while it runs, and when it is gone."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.hostile.lab.attackers import AttackTally, at_work, finished
from tests.hostile.lab.disks import mounted
from tests.hostile.lab.node import Tenant
from tests.hostile.lab.siege import Attack, Begin, Siege

AT_WORK = 20.0
"""Seconds that a tenant has for an attack that goes on and on."""


def by_a_tenant(siege: Siege, attack: Attack, program: str, *words: str | Path) -> Begin:
    """A container that runs does it, until it is stopped; then its pod ends."""

    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        async with siege.a_tenant() as tenant:
            where = (tenant.directory, program, *attack.bounds, *words)
            async with at_work(tally, "tenant", *where):
                yield
        await siege.until_removed(tenant)

    return begin


def left_behind(siege: Siege, attack: Attack, program: str, *, kept: bool = False) -> Begin:
    """A container has done it, and is gone: the attack is what the agent has to remove.

    `kept`: no agent can remove it; it is counted and told, and root removes it.
    """

    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        async with siege.a_tenant() as tenant:
            await finished(tally, "tenant", tenant.directory, program, *attack.bounds)
        tally.goes_on = tenant.aside
        yield
        if kept:
            await siege.until_kept()
            remove_as_root(tenant)
        await siege.until_removed(tenant)

    return begin


def remove_as_root(tenant: Tenant) -> None:
    for path in tenant.aside():
        subprocess.run(["chattr", "-R", "-i", path], check=False, capture_output=True)  # noqa: S603, S607 -- Debian's
        shutil.rmtree(path)


async def test_a_tenant_that_closes_and_gives_away_its_directory_holds_up_nobody(siege: Siege):
    attack = Attack("own directory closed, given away", "10 11", 100_000, AT_WORK, 2_000)

    await siege.withstand(attack, by_a_tenant(siege, attack, "modes"))


async def test_many_files_of_a_pod_that_is_gone_hold_up_nobody(siege: Siege, many: int):
    attack = Attack(f"{many:,} files left behind", "10 12", many, 120.0)

    await siege.withstand(attack, left_behind(siege, attack, "files"))


@pytest.mark.parametrize(
    ("program", "what", "threats", "most"),
    [
        ("names", "names of 255 odd bytes", "12 31", 24_000),
        ("deep", "5,000 directories in each other", "12", 25_000),
        ("kinds", "FIFOs, sockets, devices, 10 TiB", "9 12", 24_000),
    ],
)
async def test_whatever_a_pod_leaves_behind_holds_up_nobody(
    siege: Siege, program: str, what: str, threats: str, most: int
):
    attack = Attack(what, threats, most, 60.0)

    await siege.withstand(attack, left_behind(siege, attack, program))


@pytest.mark.parametrize(
    ("program", "what", "most"),
    [
        ("given_away", "closed ones of another user", 2_000),
        ("immutable", "immutable and sticky ones", 2_000),
    ],
)
async def test_what_the_agent_cannot_remove_holds_up_nobody_and_is_told(
    siege: Siege, program: str, what: str, most: int
):
    attack = Attack(what, "10", most, 60.0)

    await siege.withstand(attack, left_behind(siege, attack, program, kept=True))


async def test_a_tenant_that_renames_while_its_directory_is_removed_gains_nothing(siege: Siege):
    attack = Attack("renames while it is removed", "12", 1_000_000, AT_WORK, 5_000)

    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        """It has the directory mounted still, so that it goes on in what was set aside."""
        async with contextlib.AsyncExitStack() as stack:
            async with siege.a_tenant() as tenant:
                where = (tenant.directory, "renames", *attack.bounds)
                await stack.enter_async_context(at_work(tally, "tenant", *where))
            tally.goes_on = tenant.aside
            yield
        await siege.until_removed(tenant)

    await siege.withstand(attack, begin)


async def test_a_tenant_that_links_to_what_it_does_not_own_gets_nothing(siege: Siege):
    attack = Attack("hard links to state and sockets", "12", 200_000, AT_WORK, 20_000)
    places = siege.node.cluster.places
    paths = (*places.state.iterdir(), places.kubeconfig, siege.node.socket)

    tally = await siege.withstand(attack, by_a_tenant(siege, attack, "links", *paths))

    assert 0 == tally.facts["linked"]


async def test_of_a_file_that_root_linked_into_a_directory_that_link_goes_alone(siege: Siege):
    attack = Attack("hard links that root made", "12", 400, 60.0)
    places = siege.node.cluster.places
    targets = (places.kubeconfig, places.hook / "vgpu/libvgpu.so", siege.node.neighbour / "mine")

    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        async with siege.a_tenant() as tenant:
            for number in range(attack.most):
                os.link(targets[number % len(targets)], tenant.directory / f"{number}")
                tally.tries += 1
        yield
        await siege.until_removed(tenant)

    await siege.withstand(attack, begin)


async def test_what_is_mounted_in_a_directory_is_not_touched(siege: Siege):
    attack = Attack("a mount point inside", "12", 1, 60.0)
    victim = siege.node.cluster.places.root / "victim"
    (victim / "in").mkdir(parents=True)
    (victim / "in" / "file").write_text("mine")

    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        with contextlib.ExitStack() as stack:
            async with siege.a_tenant() as tenant:
                (tenant.directory / "a" / "b").mkdir(parents=True)
                stack.enter_context(mounted(victim, tenant.directory / "a" / "b"))
                tally.tries += 1
            tally.goes_on = tenant.aside
            yield
            await siege.until_kept()
            assert "mine" == (victim / "in" / "file").read_text()
        remove_as_root(tenant)
        await siege.until_removed(tenant)

    await siege.withstand(attack, begin)
