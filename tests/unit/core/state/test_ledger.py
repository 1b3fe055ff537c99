"""The ledger: one row a container, old ledgers stay as they were."""

import random

from msgspec.structs import replace

from agent.cluster import Role
from agent.ledger import KubeletEpoch, Ledger, Row
from agent.model import Share
from tests.builders import G1, G2, a_pod_uid, a_row

SHARES = [(), (Share(G1, 1, 1),), (Share(G2, 1, 1), Share(G1, 1, 1))]


def some_row(chance: random.Random) -> Row:
    """One of six containers' rows, with anything in it that rows are found by."""
    row = a_row(pod_uid=a_pod_uid(chance.randrange(3)), container=f"c{chance.randrange(2)}")
    return replace(
        row,
        shares=chance.choice(SHARES),
        live_limits=chance.choice([(), (Share(G2, 2, 2),)]),
        lock=chance.choice(["", "lock"]),
        confirmed=chance.random() < 0.5,
        role=chance.choice([*Role]),
        epoch=KubeletEpoch(chance.randrange(2)),
    )


def test_what_is_found_follows_every_change_and_asking_makes_no_difference():
    ledger, chance = Ledger(), random.Random(1)  # noqa: S311 -- a seed makes a test repeatable
    for _ in range(500):
        is_put, row = chance.random() < 0.7, some_row(chance)
        asked = ledger.rows_of(row.key.pod_uid)
        assert asked == tuple(one for one in ledger.rows if one.key.pod_uid == row.key.pod_uid)
        assert ledger == Ledger(ledger.rows)
        assert hash(ledger) == hash(Ledger(ledger.rows))
        for uuid in (G1, G2):
            on = [one for one in ledger.rows if uuid in {share.uuid for share in one.limits}]
            assert on == [*ledger.rows_on(uuid)]
        for lock in ("lock", "another"):
            under = {one.key.pod_uid for one in ledger.rows if one.lock == lock}
            assert under == ledger.answered_under(lock)
        booked = {
            one.key
            for one in ledger.rows
            if one.is_booked_by(row.epoch) or (one.role is Role.INIT and one.epoch == row.epoch)
        }
        assert booked == ledger.booked_by(row.epoch)
        ledger = ledger.put(row) if is_put else ledger.drop([row.key])
        assert (row if is_put else None) == ledger.find(row.key)


def test_ids_in_use_are_told_by_gpu_and_foreign_ones_are_left_out():
    ledger = Ledger(
        (
            a_row(container="a", slice_ids=(f"{G1}-3", f"{G2}-0")),
            a_row(container="b", slice_ids=(f"{G1}-3", f"{G1}-1", "foreign", f"{G1}-007")),
        )
    )
    assert {G1: (f"{G1}-1", f"{G1}-3"), G2: (f"{G2}-0",)} == ledger.held_ids
