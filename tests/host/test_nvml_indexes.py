"""Whose index is whose: kept while nothing contradicts it, and never one GPU's for another."""

from itertools import permutations

import pytest

from agent.gpu.handles import Indexes
from agent.model import GpuFault, GpuUuid, Trouble

A, B, C, D = (GpuUuid(f"GPU-{letter}") for letter in "abcd")


@pytest.fixture
def indexes() -> Indexes:
    indexes = Indexes()
    indexes.counted(3)
    indexes.seen({0: A, 1: B, 2: C})
    return indexes


def named(indexes: Indexes, *troubled: int, lost: bool = False) -> list[tuple[str, bool]]:
    trouble = Trouble.LOST if lost else Trouble.SILENT
    faults = {n: GpuFault("as asked", "slow", trouble) for n in troubled}
    return [(fault.gpu, fault.lost) for fault in indexes.named(faults)]


def test_more_faults_than_those_who_may_be_behind_them_are_said_too(indexes):
    indexes.counted(4)
    indexes.seen({0: A, 1: B})

    assert [("index 2", False), ("index 3", False), (C, False)] == named(indexes, 2, 3)


def test_a_gpu_is_gone_once_every_index_has_said_whose_it_is(indexes):
    indexes.counted(2)
    indexes.seen({0: A})
    assert [(B, False), (C, False)] == named(indexes, 1)
    assert indexes.seen({0: A, 1: C})

    assert [] == named(indexes)
    assert not indexes.counted(3)
    indexes.seen({0: A, 1: C})
    assert [("index 2", False)] == named(indexes, 2)


def test_a_gpu_that_is_seen_elsewhere_is_not_named_where_it_was(indexes):
    assert not indexes.seen({1: C})

    assert ["index 0", C, "index 2"] == [indexes.name(n) for n in range(3)]
    assert [(A, False), (B, False)] == named(indexes, 0, 2)


@pytest.mark.parametrize("order", list(permutations((A, B, C, D), 3)))
@pytest.mark.parametrize("slow", range(3))
def test_no_gpu_is_both_here_and_at_fault_whatever_has_moved_and_nobody_is_left_out(
    indexes, order, slow
):
    seen = {n: uuid for n, uuid in enumerate(order) if n != slow}
    indexes.counted(3)
    indexes.seen(seen)
    faults = {gpu for gpu, _ in named(indexes, slow)}

    assert not faults & set(seen.values())
    if order[slow] != D:
        assert order[slow] in faults
