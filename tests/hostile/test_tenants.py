"""What root in a container does to the node: by files that it leaves behind, a full disk, regions.

tests/host/test_hookdirs_hostile.py has whatever else it does to its directory.
"""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import json
import re
import statistics
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.sandbox.hami_core import HamiCoreRegion
from agent.sandbox.lab.cluster import fetch
from agent.sandbox.scenario.facts import answers, ledger_on_disk
from tests.hostile.lab.attackers import AttackTally, at_work
from tests.hostile.lab.node import NEIGHBOUR, Node, Small, Tenant, is_full, open_node
from tests.hostile.lab.siege import Attack, AttackTable, Begin, Round, Siege, changed, snapshot
from tests.hostile.lab.tenant import REGION
from tests.process.agent_process import PATIENCE, comes, offers


def left_behind(siege: Siege, attack: Attack, program: str) -> Begin:
    """A container has done it, and is gone: the attack is what the agent has to remove."""

    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        async with siege.a_tenant() as tenant:
            where = (tenant.directory, program, *attack.bounds)
            async with at_work(tally, "tenant", *where, to_end=True):
                pass
        tally.goes_on = tenant.aside
        yield
        await siege.until_removed(tenant)

    return begin


async def test_many_files_of_a_pod_that_is_gone_hold_up_nobody(siege: Siege, many: int):
    attack = Attack(f"{many:,} files left behind", "10 12", many, 120.0)

    await siege.withstand(attack, left_behind(siege, attack, "files"))


# A container fills the file system that its directory lies on, with bytes or with inodes.
#
# That it can is said in SECURITY.md, and what it costs: new pods wait or are refused with a
# sentence, what runs goes on, and all is well soon after there is room.

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
            async with at_work(tally, "tenant", *where):
                assert await comes(lambda: is_full(node.containers))
                said = await while_full(node)
                await node.is_alive()
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
    await cluster.agent.kill()
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


# What root in a container does to HAMi-core's region, while the agent reads and writes it.

LONG_AGO = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
RATE = 47.0
"""Changes a second. An odd number of them comes between two rounds, 5 s apart: what changes and
changes back is not in the same state in every round."""
CROWD = 2_000.0
"""Files a second that a directory gets."""

SEEN = {
    "swells": "no layout of HAMi-core has its size of ",
    "swaps": "it is not a regular file",
    "points": "it is not a regular file",
    "crowds": "its directory has more than 256 entries",
    "shortens": "no layout of HAMi-core has its size of ",
    "forges": "not believable: it says ",
}
"""What the agent has to say of each attacker's region at least once."""


async def test_no_region_of_a_container_holds_up_or_changes_another(table: AttackTable):
    attack = Attack("regions cut, grown, lost, forged", "13 35 36", 200_000, 60.0, RATE)
    async with open_node(slices=10) as node:
        siege = Siege(node, table)
        neighbour = node.neighbour / REGION
        a_region(neighbour)
        await until_seen(node, {NEIGHBOUR: ""})
        written = neighbour.stat().st_mtime_ns

        @contextlib.asynccontextmanager
        async def begin(tally: AttackTally) -> AsyncIterator[None]:
            async with contextlib.AsyncExitStack() as stack:
                tenants = {name: await stack.enter_async_context(siege.a_tenant()) for name in SEEN}
                for name, tenant in tenants.items():
                    await stack.enter_async_context(attacked(node, attack, tally, name, tenant))
                yield
                seen = {tenants[name].name: reason for name, reason in SEEN.items()}
                await until_seen(node, {NEIGHBOUR: ""} | seen)
            for tenant in tenants.values():
                await siege.until_removed(tenant)

        await siege.withstand(attack, begin)

        assert written == neighbour.stat().st_mtime_ns


@contextlib.asynccontextmanager
async def attacked(
    node: Node, attack: Attack, tally: AttackTally, program: str, tenant: Tenant
) -> AsyncIterator[None]:
    """A tenant whose region is as HAMi-core makes it, until its `program` works on it."""
    a_region(tenant.directory / REGION)
    rate = CROWD if program == "crowds" else attack.rate
    bounds = dataclasses.replace(attack, rate=rate).bounds
    uuids = [str(state.gpu.uuid) for state in node.cluster.hardware.states]
    words = {"points": [node.neighbour.name], "forges": uuids}.get(program, [])
    async with at_work(tally, "tenant", tenant.directory, program, *bounds, *words):
        yield


def a_region(path: Path) -> None:
    """That of a container that has not launched for long, and is neither limited nor held back."""
    region = HamiCoreRegion(path)
    region.start(7, {}, LONG_AGO)
    region.put(region.offsets.tail + 4, "ii", 0, 0)


async def until_seen(node: Node, wanted: Mapping[str, str]) -> None:
    """The agent has said so of the region of each pod, be it in different rounds."""
    missing, latest = dict(wanted), dict[str, object]()
    try:
        async with asyncio.timeout(PATIENCE):
            while missing:
                page = await fetch(node.address, "/api/v1/status")
                for one in json.loads(page.text)["data"]["allocations"]:
                    latest[one["pod"]] = one["unread"], one["lastKernel"]
                    if is_said(one, missing.get(one["pod"])):
                        del missing[one["pod"]]
                await asyncio.sleep(0.2)
    except TimeoutError:
        last = {pod: latest.get(pod) for pod in missing}
        raise AssertionError(f"never said: {missing}; said last: {last}") from None


def is_said(one: dict[str, Any], why: str | None) -> bool:
    if why == "":
        return one["lastKernel"] is not None
    return why is not None and one["unread"].startswith(why)
