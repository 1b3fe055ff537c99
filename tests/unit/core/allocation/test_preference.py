"""Which ids are offered: always ids that exist, as many as asked, at a bounded cost."""

import random
import sys

import pytest

from agent.allocate.prefer import nearest, steer
from agent.model import Link, PciPath, SliceId, slice_id
from tests.builders import a_gpu, a_uuid

NOTHING = frozenset[SliceId]()


def ids(gpu: int, *numbers: int) -> tuple[SliceId, ...]:
    return tuple(slice_id(a_uuid(gpu), number) for number in numbers)


def field(count: int) -> dict:
    return {a_uuid(n): a_gpu(index=n, numa=n // 2) for n in range(count)}


ODD = (SliceId("foreign"), SliceId("GPU-x-007"), SliceId(""))
IDS = (*(one for gpu in range(6) for one in ids(gpu, *range(10))), *ODD)


def test_steering_takes_the_lowest_free_id_and_held_ones_last():
    available = ids(1, 12, 3, 2)
    assert ids(1, 2) == steer(available, (), [a_uuid(1)], NOTHING)
    assert ids(1, 12) == steer(available, (), [a_uuid(1)], frozenset(ids(1, 2, 3)))
    assert ids(1, 2) == steer(available, (), [a_uuid(1)], frozenset(available))
    odd = SliceId(f"{a_uuid(1)}-x")
    assert ids(1, 2) == steer((odd, *available), (), [a_uuid(1)], NOTHING)


def test_steering_gives_a_gpu_twice_when_it_is_wanted_twice():
    assert ids(1, 5, 2) == steer(ids(1, 2, 5), ids(1, 5), [a_uuid(1)] * 2, NOTHING)
    assert ids(0, 5) + ids(1, 2) == steer(ids(1, 2), ids(0, 5), [a_uuid(0), a_uuid(1)], NOTHING)


@pytest.mark.parametrize(
    ("available", "must", "wanted"),
    [
        (ids(1, 2), (), [0]),
        (ids(1, 2), (), [1, 1]),
        (ids(1, 2), ids(0, 2), [1]),
        (ids(1, 2), ids(1, 0, 1), [1]),
        (ids(1, 2), (SliceId("foreign"),), [1]),
    ],
    ids=["not offered", "too few", "must is elsewhere", "must is too many", "must is foreign"],
)
def test_steering_gives_up_when_the_wanted_gpus_cannot_be_had(available, must, wanted):
    assert None is steer(available, must, [a_uuid(n) for n in wanted], NOTHING)


def test_different_gpus_come_first_and_then_are_used_evenly():
    available = ids(0, 0, 1, 2) + ids(1, 0, 1, 2)
    chosen = nearest(available, (), 4, field(2), NOTHING)
    assert set(ids(0, 0, 1) + ids(1, 0, 1)) == set(chosen)


def test_the_gpu_with_the_nvlinks_is_taken_before_the_one_next_door():
    near, far = Link(a_uuid(3), None, 4), Link(a_uuid(1), PciPath.SAME_BOARD)
    gpus = field(4) | {
        a_uuid(0): a_gpu(index=0, links=(near, far)),
        a_uuid(1): a_gpu(index=1, links=(Link(a_uuid(0), PciPath.SAME_BOARD),)),
        a_uuid(3): a_gpu(index=3, links=(Link(a_uuid(0), None, 4),)),
    }

    assert ids(0, 0) + ids(3, 0) == nearest(
        sum((ids(n, 0) for n in range(4)), ()), ids(0, 0), 2, gpus, NOTHING
    )


def test_the_emptiest_gpu_is_taken_first_and_an_unknown_one_last():
    available = ids(0, 0) + ids(1, 0, 1) + ids(9, 0, 1, 2)
    assert ids(1, 0) + ids(0, 0) + ids(1, 1) + ids(9, 0) == nearest(
        available, (), 4, field(2), NOTHING
    )


def test_always_as_many_ids_as_asked_or_none():
    chance = random.Random(1)  # noqa: S311 -- a seed makes a test repeatable
    for _ in range(500):
        available, must = (chance.choices(IDS, k=chance.randrange(most)) for most in (21, 5))
        size, held = chance.randrange(-2, 31), frozenset(chance.choices(IDS, k=3))
        check_choice(available, must, size, held)


def check_choice(available, must, size, held):
    chosen = nearest(available, must, size, field(4), held)
    every, first = set(available) | set(must), tuple(dict.fromkeys(must))
    can_be_kept = len(first) <= size <= len(every)
    assert (size if can_be_kept else 0) == len(chosen) == len(set(chosen))
    assert set(chosen) <= every
    assert chosen[: len(first)] == (first if can_be_kept else ())


@pytest.mark.parametrize("size", [1, 2, 16, 800, 1600])
def test_the_calls_stay_within_the_stated_bound_at_any_size(size):
    events, before = list[str](), sys.getprofile()
    available = [one for n in range(16) for one in ids(n, *range(100))]
    sys.setprofile(lambda _frame, event, _: events.append(event))
    try:
        chosen = nearest(available, available[: size // 2], size, field(16), NOTHING)
    finally:
        sys.setprofile(before)

    assert size == len(set(chosen))
    bound = 40 * 1600 + 16**2 * 36 + 16 * size
    assert bound >= sum(event in {"call", "c_call"} for event in events)
