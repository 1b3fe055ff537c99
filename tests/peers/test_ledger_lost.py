"""The agent's state is lost, or a day old: rows come back from annotations and the kubelet."""

import contextlib

import pytest

from agent.cluster import Role
from agent.errors import StateCorrupt
from tests.peers.lab.part import until, until_answer
from tests.peers.lab.placement import wall

EVENTS = "/api/v1/namespaces/default/events"
BACK = 5.0
BACK_WITHIN = 120.0


def state_directory(cluster):
    return cluster.space.view / "var/lib/hami-agent"


def listed(cluster):
    """Of each row whose container PodResources lists, what must come back; none: no state yet."""
    with contextlib.suppress(FileNotFoundError, StateCorrupt):
        return {
            who: (row.shares, row.slice_ids, row.group, row.edits, row.confirmed)
            for who, row in cluster.rows().items()
            if row.role is not Role.INIT
        }
    return {}


async def listed_and_confirmed(cluster):
    """The same, once the kubelet has confirmed them all. Raises TimeoutError."""
    await until(
        lambda: bool(cluster.rows()) and all(row.confirmed for row in cluster.rows().values()),
        20.0,
        lambda: f"{cluster.rows()}",
    )
    return listed(cluster)


async def until_rows(cluster, wanted):
    """Return once those are the rows again. Raises TimeoutError."""
    await until(lambda: wanted == listed(cluster), BACK_WITHIN, lambda: f"{listed(cluster)}")


@pytest.mark.timeout(300)  # longer than what is waited for inside, which tells more
async def test_rows_of_running_pods_come_back_and_the_pods_notice_nothing(cluster, agent, table):
    names = await cluster.run_shapes()
    before, wanted = cluster.lives_of(names), await listed_and_confirmed(cluster)

    await agent.part.kill()
    for path in state_directory(cluster).glob("state*.json"):
        path.write_bytes(b"\0" * path.stat().st_size)
    began = wall()
    await agent.part.start()
    await until_rows(cluster, wanted)
    table.hold("state lost: agent starts → rows are back", wall() - began, BACK)

    await cluster.until_allocatable()
    new = await cluster.run(cluster.a_telling_pod("new"))
    for name in (*names, *new):
        assert cluster.expected_inside(name) == await cluster.seen_inside(name)
    await cluster.until_settled(*new)
    assert before == cluster.lives_of(names)
    assert wanted.items() < listed(cluster).items()
    assert {} == cluster.oversold()
    await until_answer(lambda: is_told(cluster), 20.0, agent.part.tail)


async def is_told(cluster):
    """Whether the Node has the Event."""
    found = (await cluster.api.get(EVENTS))["items"]
    return any(one["reason"] == "StateRecovered" for one in found)
