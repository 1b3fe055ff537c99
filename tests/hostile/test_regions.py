"""What root in a container does to HAMi-core's region, while the agent reads and writes it."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from agent.sandbox.hami_core import HAMI_2_9_0, HamiCoreRegion
from agent.sandbox.lab.web import fetch
from tests.hostile.lab.attackers import AttackTally, at_work
from tests.hostile.lab.node import NEIGHBOUR, Node, Tenant, open_node
from tests.hostile.lab.siege import Attack, Siege
from tests.hostile.lab.table import AttackTable
from tests.hostile.lab.tenant import REGION
from tests.process.agent_process import PATIENCE

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
    region = HamiCoreRegion(path, HAMI_2_9_0)
    region.start(7, {}, LONG_AGO)
    region.put(region.offsets.tail + 4, "ii", 0, 0)


async def until_seen(node: Node, wanted: Mapping[str, str]) -> None:
    """The agent has said so of the region of each pod, be it in different rounds."""
    missing, latest = dict(wanted), dict[str, object]()
    try:
        async with asyncio.timeout(PATIENCE):
            while missing:
                page = await fetch(node.address, "/api/v1/allocations")
                for one in json.loads(page.text)["data"]:
                    latest[one["pod"]] = one["unread"], one["processes"]
                    if is_said(one, missing.get(one["pod"])):
                        del missing[one["pod"]]
                await asyncio.sleep(0.2)
    except TimeoutError:
        last = {pod: latest.get(pod) for pod in missing}
        raise AssertionError(f"never said: {missing}; said last: {last}") from None


def is_said(one: dict[str, Any], why: str | None) -> bool:
    if why == "":
        return one["processes"] is not None
    return why is not None and one["unread"].startswith(why)
