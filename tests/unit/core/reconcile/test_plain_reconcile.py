"""Plain mode's rows against the kubelet: a row is over only when no container can live by it."""

import datetime as dt
import itertools

import pytest

from agent.cluster import PodTable, PodUid
from agent.ledger import UNCONFIRMED_AFTER, ContainerKey, Holder, Ledger, gaps
from agent.model import SliceId
from agent.reconcile import GRACE, LOST_GRACE, UNREAD_GRACE, ReconcileFacts, judge_by_kubelet
from tests.builders import G1, NOON, a_pod_uid
from tests.unit.core.allocation.plain_scene import (
    EPOCH,
    HOLDER,
    NEXT,
    RESOURCE,
    a_plain_row,
    holds,
    ids,
)

ROW = a_plain_row()
CONFIRMED = a_plain_row(holder=HOLDER)
OTHER = Holder("team-b", "eval-0", "main")
SECOND = PodUid("b" * 32)
BYSTANDER = holds(Holder("kube-system", "proxy", "main"))


def look(*rows, at=0.0, idle=None, **seen):
    """What one look finds; the checkpoint file names what is held, unless told otherwise."""
    holdings = seen.get("holdings", ())
    named = tuple(
        ids[RESOURCE] for one in holdings for ids in one.containers.values() if RESOURCE in ids
    )
    recorded = seen.get("recorded", named)
    keys = (ContainerKey(a_pod_uid(number), "main") for number in itertools.count())
    found = ReconcileFacts(
        table=PodTable(synced=True),
        holdings=holdings,
        recorded=None if recorded is None else dict(zip(keys, recorded, strict=False)),
        epoch=seen.get("epoch", EPOCH),
        now=NOON + dt.timedelta(seconds=at),
        elapsed=at,
        idle=idle or {},
    )
    return judge_by_kubelet(Ledger(rows), found, RESOURCE)


def closes_after(*rows, **seen):
    """How long the first row is seen without a holder until it is over; None: for ever."""
    first = look(*rows, **seen)
    if (rows[0].key, rows[0].answered_at) not in first.idle:
        return None
    for grace in (GRACE, UNREAD_GRACE, LOST_GRACE):
        later = look(*rows, idle=first.idle, **(seen | {"at": grace}))
        if rows[0] in later.over:
            early = look(*rows, idle=first.idle, **(seen | {"at": grace - 1}))
            assert rows[0] not in early.over
            return grace
    return None


HELD = [holds(HOLDER, *ids(0))]
RECORDED = [frozenset(ids(0))]
NEW = a_plain_row(uid=SECOND, slice_ids=ids(5), minute=1)
MINE = a_plain_row(uid=SECOND, holder=OTHER)
INIT = a_plain_row(confirmed=True)
ANEW = [holds(HOLDER, *ids(5))]


@pytest.mark.parametrize(
    ("rows", "seen", "grace"),
    [
        # A holder that goes away under one kubelet, and an answer that nobody booked.
        ([CONFIRMED], {}, GRACE),
        ([ROW], {}, GRACE),
        # The ids are held by a holder that nobody was seen as.
        ([ROW], {"holdings": [holds(OTHER, *ids(0, 1))]}, None),
        # It is listed without ids: after a lost checkpoint, a container that runs on.
        ([CONFIRMED], {"holdings": [holds(HOLDER)]}, None),
        ([CONFIRMED], {"holdings": [holds(HOLDER)], "epoch": NEXT, "recorded": ()}, None),
        # A kubelet that knows no pod yet: its checkpoint names the ids, is empty or unreadable.
        ([CONFIRMED], {"epoch": NEXT, "recorded": RECORDED}, None),
        *(([row], {"epoch": NEXT, "recorded": ()}, None) for row in (ROW, CONFIRMED)),
        *(([row], {"epoch": NEXT, "recorded": None}, None) for row in (ROW, CONFIRMED)),
        # A holder of an earlier kubelet is gone when the checkpoint agrees, or after long.
        ([CONFIRMED], {"epoch": NEXT, "holdings": [BYSTANDER]}, GRACE),
        ([CONFIRMED], {"epoch": NEXT, "holdings": [BYSTANDER], "recorded": None}, UNREAD_GRACE),
        ([ROW], {"recorded": None}, UNREAD_GRACE),
        # The ids went to the next holder.
        ([CONFIRMED, MINE], {"epoch": NEXT, "holdings": [holds(OTHER, *ids(0))]}, GRACE),
        # An init container that a lost checkpoint forgot.
        *(([INIT], {"epoch": NEXT, "recorded": recorded}, LOST_GRACE) for recorded in (None, ())),
        # A container that was answered anew lives by its new row, or by one of hami mode.
        ([CONFIRMED, NEW], {"holdings": ANEW}, GRACE),
        ([NEW, CONFIRMED], {"holdings": ANEW}, None),
        ([CONFIRMED], {"holdings": ANEW}, GRACE),
    ],
)
def test_a_row_is_over_after_its_grace_once_no_container_can_live_by_it(rows, seen, grace):
    assert grace == closes_after(*rows, **seen)


@pytest.mark.parametrize(
    ("rows", "seen"),
    [
        ([CONFIRMED], {"holdings": HELD}),  # confirmed already
        ([ROW], {"holdings": [holds(HOLDER, *ids(0), resource="example.com/fpga")]}),
        ([], {"holdings": [holds(HOLDER, SliceId(G1))]}),  # ids that are no slices
    ],
)
def test_what_is_explained_or_not_ours_is_no_news(rows, seen):
    found = look(*rows, **seen)
    assert ((), ()) == (found.confirmed, found.strangers)


def test_an_init_container_is_confirmed_by_the_checkpoint_alone():
    (row,) = look(ROW, recorded=RECORDED).confirmed
    assert (True, None) == (row.confirmed, row.holder)
    assert None is closes_after(row, recorded=RECORDED)
    assert GRACE == closes_after(row)


def test_of_two_containers_with_the_same_ids_nobody_says_which_row_is_whose():
    rows = (ROW, a_plain_row(uid=SECOND, minute=1))
    both = [holds(HOLDER, *ids(0)), holds(OTHER, *ids(0))]
    found = look(*rows, holdings=both)
    assert [None, None] == [row.holder for row in found.confirmed]
    assert () == found.strangers
    for row in rows:
        assert None is closes_after(row, *rows, holdings=both)


def test_the_one_that_stays_may_live_by_either_row():
    rows = (ROW, a_plain_row(uid=SECOND, minute=1))
    found = look(*rows, holdings=[holds(OTHER, *ids(0))])
    assert [OTHER, OTHER] == [row.holder for row in found.confirmed]


@pytest.mark.parametrize(("late", "count"), [(False, 0), (True, 1)])
def test_a_row_that_nobody_booked_is_counted_after_a_minute(late, count):
    at = UNCONFIRMED_AFTER - dt.timedelta(seconds=int(not late))
    assert () == look(ROW, at=at.total_seconds(), holdings=[holds(OTHER, *ids(0, 1))]).confirmed
    assert (0, count) == gaps(Ledger((ROW,)), NOON + at)
    assert (0, 0) == gaps(Ledger((CONFIRMED,)), NOON + at)


def test_of_rows_with_the_same_ids_a_holder_takes_the_one_that_is_left_if_it_is_the_only_one():
    two = [holds(HOLDER, *ids(0)), holds(OTHER, *ids(0))]
    (row,) = look(CONFIRMED, a_plain_row(uid=SECOND, minute=1), holdings=two).confirmed
    assert (SECOND, OTHER) == (row.key.pod_uid, row.holder)
    # Beside an init container with the same ids nobody says which row is whose.
    rows, recorded = (ROW, a_plain_row(uid=SECOND, minute=1)), RECORDED * 2
    found = look(*rows, holdings=HELD, recorded=recorded).confirmed
    assert [None, None] == [row.holder for row in found]
    assert None is closes_after(*rows, recorded=recorded)
