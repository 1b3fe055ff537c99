"""The agent's state is lost, or a day old: rows come back from annotations and the kubelet."""

import contextlib
import datetime as dt

import msgspec
import pytest

from agent.cluster import Role
from agent.errors import StateCorrupt
from agent.state import decode_state, encode_state
from tests.peers.lab.grants import (
    environment_bytes,
    expected_inside,
    lost,
    oversold,
    rows,
    seen_inside,
    seen_mounts,
)
from tests.peers.lab.node_state import until_allocatable, until_unlocked
from tests.peers.lab.nodes import dies
from tests.peers.lab.placement import wall
from tests.peers.lab.pods import (
    a_telling_pod,
    as_seen,
    delete,
    lives_of,
    run,
    run_shapes,
    until_deleted,
    until_settled,
    until_told,
)
from tests.peers.lab.space import until, until_answer

DAY = dt.timedelta(days=1)
EVENTS = "/api/v1/namespaces/default/events"
BACK = 5.0
GONE = 65.0
"""Seconds from the start: a pod may have been deleted just before, so its row stays a minute."""
BACK_WITHIN = 120.0


def state_directory(cluster):
    return cluster.space.view / "var/lib/hami-agent"


def lose_state(cluster):
    """Both generations of it."""
    for path in state_directory(cluster).glob("state*.json"):
        path.unlink()


def listed(cluster):
    """Of each row whose container PodResources lists, what must come back; none: no state yet."""
    with contextlib.suppress(FileNotFoundError, StateCorrupt):
        return {
            who: (row.shares, row.slice_ids, row.group, row.edits, row.confirmed)
            for who, row in rows(cluster).items()
            if row.role is not Role.INIT
        }
    return {}


async def listed_and_confirmed(cluster):
    """The same, once the kubelet has confirmed them all. Raises TimeoutError."""
    await until(
        lambda: bool(rows(cluster)) and all(row.confirmed for row in rows(cluster).values()),
        20.0,
        lambda: f"{rows(cluster)}",
    )
    return listed(cluster)


async def until_rows(cluster, wanted):
    """Return once those are the rows again. Raises TimeoutError."""
    await until(lambda: wanted == listed(cluster), BACK_WITHIN, lambda: f"{listed(cluster)}")


def inside_of(cluster, name):
    """What a container was told, to the byte."""
    return environment_bytes(cluster, name), seen_mounts(cluster, name)


@pytest.mark.timeout(300)  # longer than what is waited for inside, which tells more
async def test_rows_of_running_pods_come_back_and_the_pods_notice_nothing(cluster, agent, table):
    names = await run_shapes(cluster)
    before, wanted = lives_of(cluster, names), await listed_and_confirmed(cluster)

    await agent.part.kill()
    for path in state_directory(cluster).glob("state*.json"):
        path.write_bytes(b"\0" * path.stat().st_size)
    began = wall()
    await agent.part.start()
    await until_rows(cluster, wanted)
    table.hold("state lost: agent starts → rows are back", wall() - began, BACK)

    await until_allocatable(cluster)
    new = await run(cluster, a_telling_pod(cluster, "new"))
    for name in (*names, *new):
        assert expected_inside(cluster, name) == await seen_inside(cluster, name)
    await until_settled(cluster, *new)
    assert before == lives_of(cluster, names)
    assert wanted.items() < listed(cluster).items()
    assert {} == oversold(cluster)
    await until_answer(lambda: is_told(cluster), 20.0, agent.part.tail)


async def is_told(cluster):
    """Whether the Node has the Event."""
    found = (await cluster.api.get(EVENTS))["items"]
    return any(one["reason"] == "StateRecovered" for one in found)


async def three_pods(cluster):
    """One that is about to die, and two that live."""
    names = await run(
        cluster,
        a_telling_pod(cluster, "dies", gpus=2, memory=7000),
        *(a_telling_pod(cluster, f"lives-{number}") for number in range(2)),
    )
    await until_settled(cluster, *names)
    await until_told(cluster, *names)
    return names


async def test_a_container_that_dies_after_both_lost_their_records_starts_as_it_was(
    cluster, agent, table
):
    names = await three_pods(cluster)
    before, inside = lives_of(cluster, names), inside_of(cluster, "dies")
    wanted = await listed_and_confirmed(cluster)

    await agent.part.kill()
    lose_state(cluster)
    await agent.part.start()
    await until_rows(cluster, wanted)
    await cluster.kubelet.restart(lose_checkpoint=True)
    await until_allocatable(cluster)
    died = wall()
    await dies(cluster, "dies")
    table.add("both lost their records: a container dies → it runs again", wall() - died)

    assert inside == inside_of(cluster, "dies")
    after = lives_of(cluster, names)
    assert {**before, "dies": after["dies"]} == after
    await run(cluster, a_telling_pod(cluster, "new", memory=500))
    assert expected_inside(cluster, "new") == await seen_inside(cluster, "new")
    assert {} == oversold(cluster)


def age(cluster):
    """All answers were given a day ago."""
    for path in state_directory(cluster).glob("state*.json"):
        found = decode_state(path.read_bytes())
        aged = tuple(
            msgspec.structs.replace(row, answered_at=row.answered_at - DAY)
            for row in found.ledger.rows
        )
        ledger = msgspec.structs.replace(found.ledger, rows=aged)
        path.write_bytes(encode_state(msgspec.structs.replace(found, ledger=ledger)))


def directories(cluster):
    """Those of the containers that there are on the node."""
    return {path.name for path in (cluster.hook / "containers").iterdir()}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kept", [True, False], ids=["ledger kept", "ledger lost"])
async def test_after_a_day_away_what_belongs_to_nobody_goes(cluster, agent, table, kept):
    names = await run(
        cluster, *(a_telling_pod(cluster, name) for name in ("gone", "ended", "stays"))
    )
    await until_settled(cluster, *names)
    await until_told(cluster, *names)
    before, stays = lives_of(cluster, ["stays"]), ("default/stays", "main")
    wanted = (await listed_and_confirmed(cluster))[stays]
    mine, all_of_them = {f"{uid_of(cluster, 'stays')}_main"}, directories(cluster)

    await agent.part.kill()
    for name in ("gone", "ended"):
        await delete(cluster, name, grace=0)
        await until_deleted(cluster, name)
    if kept:
        age(cluster)
    else:
        lose_state(cluster)
    began = wall()
    await agent.part.start()
    await until_rows(cluster, {stays: wanted})
    # Without a row to tell whose they are, ten minutes must have passed since they changed.
    left = mine if kept else all_of_them
    await until(lambda: left == directories(cluster), 60.0, lambda: f"{directories(cluster)}")
    table.hold("a day away: agent starts → rows as they should be", wall() - began, GONE)

    assert before == lives_of(cluster, ["stays"])
    await until_unlocked(cluster)
    await until_allocatable(cluster)
    await run(cluster, a_telling_pod(cluster, "new"))
    assert expected_inside(cluster, "new") == await seen_inside(cluster, "new")
    assert [] == lost(cluster)


def uid_of(cluster, name):
    return as_seen(cluster, name)["metadata"]["uid"]
