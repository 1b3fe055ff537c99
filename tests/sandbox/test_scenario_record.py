"""A claim is true only if it was checked, and stays false once it was."""

import pytest

from agent.sandbox.scenario.record import NOT_REACHED, Moment, ScenarioRecord

PROMISED = {"a": "a holds", "b": "b holds"}


def a_record() -> tuple[ScenarioRecord, list[Moment]]:
    told: list[Moment] = []
    return ScenarioRecord(PROMISED, told.append), told


async def test_a_claim_that_was_not_reached_is_not_true():
    record, _ = a_record()
    record.settle("a", "1")

    assert [("a", True, "1"), ("b", False, NOT_REACHED)] == [
        (claim.id, claim.ok, claim.measured) for claim in record.claims
    ]
    assert not record.ok


async def test_all_claims_checked_and_without_problems_are_true():
    record, _ = a_record()
    record.settle("a", "1")
    record.settle("b", "2")

    assert record.ok


async def test_a_claim_with_a_problem_is_false_and_says_it():
    record, told = a_record()
    record.settle("a", "1", ["this", "that"])

    assert (False, "this; that") == (record.claims[0].ok, record.claims[0].measured)
    assert [("a holds", "this; that", False)] == [(m.text, m.detail, m.ok) for m in told]


async def test_a_false_claim_does_not_become_true_again():
    record, _ = a_record()
    record.settle("a", "", ["wrong"])
    record.settle("a", "fine")
    record.settle("b", "fine")

    assert not record.ok


async def test_a_claim_that_nobody_promised_is_a_mistake():
    record, _ = a_record()

    with pytest.raises(KeyError):
        record.settle("c", "1")


async def test_what_is_awaited_ends_with_the_next_moment():
    record, told = a_record()
    record.awaited = "a holds"
    record.note("news")

    assert "" == record.awaited
    assert [("news", None)] == [(moment.text, moment.ok) for moment in told]
