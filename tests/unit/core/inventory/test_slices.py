"""Slices, the arithmetic of what is registered, and what a GPU serves."""

import pytest

from agent.model import (
    INT32_MAX,
    MIB,
    Condition,
    Gpu,
    Link,
    PciPath,
    SharingSettings,
    SliceId,
    listed_ids,
    pair_scores,
    registered_core_percent,
    registered_mib,
    split_slice_id,
)
from tests.builders import G1, G2, a_gpu, a_health, a_shared_gpu, a_uuid
from tests.hami_vectors import Vector, cases, vectors

OURS = {"memory_scaling-113": None, "memory_scaling-114": INT32_MAX}
"""A GPU without a whole MiB is left out: a scheduler would give it away as if without limit. What
32 bits cannot say is held at the greatest number, where HAMi registers a negative one."""
OTHER = dict.fromkeys(("memory_scaling-242", "memory_scaling-243"), "another input, tested below")


@pytest.mark.parametrize("vector", cases("memory_scaling", without=OTHER), ids=str)
def test_memory_is_scaled_as_hami_does(vector: Vector):
    settings = SharingSettings(memory_scaling=vector.given["deviceMemoryScaling"])
    found = registered_mib(vector.given["totalBytes"] // MIB, settings)
    assert OURS.get(vector.id, vector.expected) == found
    assert INT32_MAX == registered_mib(2**31, SharingSettings())


def test_nothing_is_scaled_in_mode_mig():
    vector = vectors("memory_scaling")["memory_scaling-243"]
    settings = SharingSettings(
        memory_scaling=vector.given["deviceMemoryScaling"],
        core_scaling=vector.given["deviceCoreScaling"],
        mode=vector.given["mode"],
    )
    assert vector.expected == {
        "devmem": registered_mib(vector.given["totalBytes"] // MIB, settings),
        "devcore": registered_core_percent(settings),
    }


@pytest.mark.parametrize("vector", cases("core_scaling"), ids=str)
def test_cores_are_scaled_as_hami_does(vector: Vector):
    assert vector.expected == registered_core_percent(SharingSettings(core_scaling=vector.given))


NO_IDS = ["", "7", "-7", "GPU", "GPU-", "GPU-07", "GPU-x", "GPU-\N{SUPERSCRIPT TWO}"]


@pytest.mark.parametrize("text", [*NO_IDS, f"GPU-{'9' * 5000}"], ids=lambda text: text[:50])
def test_what_is_no_slice_id_is_none(text: str):
    assert split_slice_id(text) is None


def test_held_ids_stay_listed_when_the_split_count_falls():
    texts = (f"{G1}-7", f"{G1}-1", f"{G2}-0", "junk")
    held = tuple(map(SliceId, texts))
    assert (f"{G1}-1", f"{G1}-7") == listed_ids(G1, 1, held)
    assert (f"{G1}-0", f"{G1}-1", f"{G1}-7") == listed_ids(G1, 3, held)


# Inventory snapshots, what a GPU serves, and what kubelet and pods are asked by.


@pytest.mark.parametrize(
    ("parts", "unavailable_reason"),
    [
        ({}, ""),
        ({"health": a_health(condition=Condition.BAD, text="XID 48")}, "is bad: XID 48"),
        ({"health": a_health(condition=Condition.LOST, cause="lost")}, "is lost: lost"),
        ({"present": False, "obstacle": "no name; wait"}, "is not shared: no name; wait"),
        ({"present": False, "wanted": False}, "is filtered out by the settings"),
        ({"present": False, "there": False}, "is not on the node any more"),
        ({"present": False, "wanted": False, "there": False}, "is not on the node any more"),
    ],
)
def test_why_a_gpu_is_given_to_nobody_reads_behind_its_name(parts, unavailable_reason):
    assert unavailable_reason == a_shared_gpu(**parts).unavailable_reason


# The points of a pair of GPUs: HAMi's classes, from what both sides tell of their links.


def joined(matrix: list[list[tuple[PciPath | None, int] | None]]) -> list[Gpu]:
    """GPUs whose links are the rows of the matrix."""
    return [
        a_gpu(
            index=row,
            links=tuple(
                Link(a_uuid(column), *cell)
                for column, cell in enumerate(cells)
                if cell is not None and column != row
            ),
        )
        for row, cells in enumerate(matrix)
    ]


def score(there: tuple[PciPath | None, int] | None, back: tuple[PciPath | None, int] | None) -> int:
    return pair_scores(joined([[None, there], [back, None]]))[a_uuid(0)][a_uuid(1)]


def test_every_class_of_path_has_its_points():
    paths = [
        *(PciPath.CROSS_CPU, PciPath.SAME_CPU, PciPath.HOST_BRIDGE, PciPath.MULTI_SWITCH),
        *(PciPath.SINGLE_SWITCH, PciPath.SAME_BOARD),
    ]
    assert [10, 20, 30, 40, 50, 60] == [score((path, 0), (path, 0)) for path in paths]
    assert 0 == score((None, 0), (None, 0))


@pytest.mark.parametrize("nvlinks", range(1, 19))
def test_every_nvlink_adds_a_hundred_up_to_the_most_that_there_are_classes_for(nvlinks: int):
    assert 100 * nvlinks == score((None, nvlinks), (None, nvlinks))
    assert 100 * nvlinks + 10 == score((PciPath.CROSS_CPU, nvlinks), (PciPath.CROSS_CPU, nvlinks))
    assert 1800 == score((None, 18 + nvlinks), (None, 40))


@pytest.mark.parametrize(
    ("there", "back", "points"),
    [
        ((PciPath.SAME_CPU, 4), (PciPath.SAME_CPU, 0), (0, 0)),
        ((PciPath.SAME_CPU, 0), None, (0, 0)),
        (None, (None, 2), (0, 0)),
        ((None, 2), None, (0, 0)),
        # As in HAMi only the number of kinds is compared: each side counts what it tells itself.
        ((PciPath.SAME_CPU, 4), (PciPath.CROSS_CPU, 2), (420, 210)),
    ],
)
def test_a_pair_whose_sides_tell_of_different_kinds_scores_nothing(there, back, points):
    gpus = joined([[None, there], [back, None]])
    first, second = a_uuid(0), a_uuid(1)
    assert {first: {second: points[0]}, second: {first: points[1]}} == pair_scores(gpus)
