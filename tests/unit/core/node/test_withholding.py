"""withheld(): slices go at the first reason and come back when none was there for the hold-off."""

from hypothesis import given
from hypothesis import strategies as st

from agent.core.node.withholding import HOLD_OFF, Withholding, withheld

REASON = ("HAMi-core is not installed on this node. [HA-5005]",)
FULL = ("The agent cannot keep its state. [HA-5001]",)


def test_while_it_waits_it_says_what_was_wrong():
    assert REASON == withheld(Withholding(REASON), (), 10.0).reasons


def test_a_reason_that_comes_back_begins_the_hold_off_anew():
    state = withheld(Withholding(REASON), (), 10.0)
    state = withheld(state, FULL, 14.0)

    assert Withholding(FULL) == state
    assert withheld(withheld(state, (), 14.5), (), 15.1).holds


@given(st.lists(st.tuples(st.booleans(), st.floats(0.01, 4.0)), max_size=40))
def test_slices_are_on_offer_exactly_when_nothing_was_wrong_for_the_hold_off(looks):
    state, now = Withholding(), 0.0
    well_since: float | None = -HOLD_OFF
    for is_wrong, gap in looks:
        now += gap
        if is_wrong:
            well_since = None
        elif well_since is None:
            well_since = now
        state = withheld(state, REASON if is_wrong else (), now)

        assert state.holds == (well_since is None or now < well_since + HOLD_OFF)
