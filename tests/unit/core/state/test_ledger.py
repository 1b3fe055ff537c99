"""The ledger: one row a container, old ledgers stay as they were."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from agent.cluster import Role
from agent.ledger import KubeletEpoch, Ledger
from agent.model import Share
from tests.builders import G1, G2, a_pod_uid, a_row

ROWS = st.builds(
    lambda pod, container, group, changes: msgspec.structs.replace(
        a_row(pod_uid=a_pod_uid(pod), container=f"c{container}", group=group), **changes
    ),
    st.integers(0, 2),
    st.integers(0, 1),
    st.integers(0, 3),
    st.fixed_dictionaries(
        {},
        optional={
            "shares": st.lists(st.sampled_from([Share(G1, 1, 1), Share(G2, 1, 1)]), max_size=2).map(
                tuple
            ),
            "live_limits": st.just((Share(G2, 2, 2),)),
            "lock": st.sampled_from(["", "lock"]),
            "confirmed": st.booleans(),
            "role": st.sampled_from(Role),
            "epoch": st.sampled_from([KubeletEpoch(1), KubeletEpoch(2)]),
        },
    ),
)


@given(st.lists(st.tuples(st.booleans(), ROWS), max_size=12))
def test_what_is_found_follows_every_change_and_asking_makes_no_difference(steps):
    ledger = Ledger()
    for is_put, row in steps:
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
