"""Which ids are offered: always ids that exist, as many as asked, at a bounded cost."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.gpu import Gpu, GpuUuid, Link, PciPath
from agent.core.preference import nearest, steer
from agent.core.slices import SliceId, slice_id
from tests.builders import a_gpu, a_uuid

NOTHING = frozenset[SliceId]()


def ids(gpu: int, *numbers: int) -> tuple[SliceId, ...]:
    return tuple(slice_id(a_uuid(gpu), number) for number in numbers)


def field(count: int) -> dict:
    return {a_uuid(n): a_gpu(index=n, numa=n // 2) for n in range(count)}


KNOWN = st.builds(lambda gpu, n: slice_id(a_uuid(gpu), n), st.integers(0, 5), st.integers(0, 9))
IDS = KNOWN | st.sampled_from([SliceId("foreign"), SliceId("GPU-x-007"), SliceId("")])
LISTS = st.lists(IDS, max_size=20)


@given(LISTS, st.lists(IDS, max_size=4), st.integers(-2, 30), st.frozensets(IDS, max_size=5))
def test_always_as_many_ids_as_asked_or_all_of_them(available, must, size, held):
    chosen = nearest(available, must, size, field(4), held)

    every = set(available) | set(must)
    assert len(chosen) == len(set(chosen)) == min(max(size, 0), len(every))
    assert set(chosen) <= every
    first = tuple(dict.fromkeys(must))[: max(size, 0)]
    assert first == chosen[: len(first)]


@given(
    LISTS,
    st.lists(IDS, max_size=3),
    st.lists(st.integers(0, 5).map(a_uuid), max_size=4),
    st.frozensets(IDS, max_size=5),
)
def test_steering_gives_exactly_the_wanted_gpus_or_nothing(available, must, wanted, held):
    chosen = steer(available, must, wanted, held)

    if chosen is not None:
        first = tuple(dict.fromkeys(must))
        assert first == chosen[: len(first)]
        assert set(chosen) <= set(available) | set(must)
        assert len(chosen) == len(set(chosen))
        assert sorted(text.rpartition("-")[0] for text in chosen) == sorted(wanted)


def test_steering_takes_the_lowest_free_id_and_held_ones_last():
    available = ids(1, 12, 3, 2)

    assert ids(1, 2) == steer(available, (), [a_uuid(1)], NOTHING)
    assert ids(1, 12) == steer(available, (), [a_uuid(1)], frozenset(ids(1, 2, 3)))
    assert ids(1, 2) == steer(available, (), [a_uuid(1)], frozenset(available))


def test_steering_gives_a_gpu_twice_when_it_is_wanted_twice():
    assert ids(1, 5, 2) == steer(ids(1, 2, 5), ids(1, 5), [a_uuid(1)] * 2, NOTHING)


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
    gpus = field(4) | {a_uuid(0): a_gpu(index=0, links=(near, far))}

    assert ids(0, 0) + ids(3, 0) == nearest(
        sum((ids(n, 0) for n in range(4)), ()), ids(0, 0), 2, gpus, NOTHING
    )


def test_the_same_numa_node_decides_where_links_do_not():
    gpus = {a_uuid(n): a_gpu(index=n, numa=numa) for n, numa in enumerate((1, 0, None, 1))}
    available = sum((ids(n, 0) for n in range(4)), ())

    assert ids(0, 0) + ids(3, 0) == nearest(available, ids(0, 0), 2, gpus, NOTHING)


def test_the_emptiest_gpu_is_taken_first_and_an_unknown_one_last():
    available = ids(0, 0) + ids(1, 0, 1) + ids(9, 0, 1, 2)

    assert ids(1, 0) + ids(0, 0) + ids(1, 1) + ids(9, 0) == nearest(
        available, (), 4, field(2), NOTHING
    )


@pytest.mark.parametrize("size", [1, 8, 16, 100, 800, 1600])
def test_the_cost_stays_small_at_any_size(size):
    count = 16
    links = tuple(Link(a_uuid(n), PciPath.SAME_CPU, 2) for n in range(count))
    gpus: dict[GpuUuid, Gpu] = {
        a_uuid(n): a_gpu(index=n, links=tuple(one for one in links if one.peer != a_uuid(n)))
        for n in range(count)
    }
    available = [one for n in range(count) for one in ids(n, *range(100))]
    must = available[: size // 2]
    calls = 0

    def count_calls(*_event: object) -> None:
        nonlocal calls
        calls += 1

    before = sys.getprofile()
    sys.setprofile(count_calls)
    try:
        chosen = nearest(available, must, size, gpus, NOTHING)
    finally:
        sys.setprofile(before)

    assert size == len(set(chosen))
    assert 120 * len(available) + count * count * (count + 20) > calls
