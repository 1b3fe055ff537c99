"""The points of a pair of GPUs: HAMi's classes, from what both sides tell of their links."""

import pytest

from agent.model import Gpu, Link, PciPath, pair_scores
from tests.builders import a_gpu, a_uuid


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


@pytest.mark.parametrize(
    ("path", "points"),
    [
        (PciPath.CROSS_CPU, 10),
        (PciPath.SAME_CPU, 20),
        (PciPath.HOST_BRIDGE, 30),
        (PciPath.MULTI_SWITCH, 40),
        (PciPath.SINGLE_SWITCH, 50),
        (PciPath.SAME_BOARD, 60),
        (None, 0),
    ],
)
def test_every_class_of_path_has_its_points(path: PciPath | None, points: int):
    assert points == score((path, 0), (path, 0))


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


def test_a_link_to_a_gpu_that_is_not_shared_counts_nowhere():
    gpus = joined([[None, None, (None, 4)], [None, None, None], [(None, 4), None, None]])

    assert {a_uuid(0): {a_uuid(1): 0}, a_uuid(1): {a_uuid(0): 0}} == pair_scores(gpus[:2])
