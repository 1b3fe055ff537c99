"""Inventory snapshots, what a GPU serves, and what kubelet and pods are asked by."""

import pytest

from agent.model import NO_INDEX, Condition, GpuFault
from tests.builders import (
    a_health,
    a_shared_gpu,
)


@pytest.mark.parametrize(
    ("present", "condition", "serving"),
    [
        (True, Condition.OK, True),
        (True, Condition.WATCH, True),
        (True, Condition.BAD, False),
        (False, Condition.OK, False),
    ],
)
def test_a_gpu_serves_while_it_is_there_and_well(present, condition, serving):
    shared = a_shared_gpu(present=present, health=a_health(condition=condition))
    assert serving is shared.serving


@pytest.mark.parametrize(
    ("parts", "plight"),
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
def test_why_a_gpu_is_given_to_nobody_reads_behind_its_name(parts, plight):
    assert plight == a_shared_gpu(**parts).plight


@pytest.mark.parametrize(
    ("gpu", "index", "name"),
    [
        ("GPU-a", 3, "GPU 3 (GPU-a)"),
        ("GPU-a", NO_INDEX, "GPU GPU-a"),
        ("index 3", 3, "GPU index 3"),
    ],
)
def test_a_fault_names_its_gpu_by_what_is_known(gpu: str, index: int, name: str):
    assert f"{name}: it is lost" == GpuFault(gpu, "it is lost", index=index).sentence
