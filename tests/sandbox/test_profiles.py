"""Simulated hardware by the name of a model."""

import pytest

from agent.errors import SettingsError
from agent.model import PciPath
from agent.sandbox.hardware import described


@pytest.mark.parametrize(
    ("profile", "name", "memory", "nvlinks"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", 81559, 18),
        ("a100", "NVIDIA A100-SXM4-80GB", 81920, 12),
        ("t4", "Tesla T4", 15360, 0),
        ("rtx3090", "NVIDIA GeForce RTX 3090", 24576, 4),
    ],
)
def test_a_profile_is_as_the_driver_describes_the_model(profile, name, memory, nvlinks):
    gpus = described(f"{profile}:4").gpus

    assert [(name, memory)] * 4 == [(gpu.name, gpu.memory_mib) for gpu in gpus]
    assert [0, 0, 1, 1] == [gpu.numa for gpu in gpus]
    assert nvlinks == gpus[0].links[0].nvlinks
    assert [PciPath.SAME_CPU, PciPath.CROSS_CPU, PciPath.CROSS_CPU] == [
        link.path for link in gpus[0].links
    ]
    assert 4 == len({gpu.uuid for gpu in gpus}) == len({gpu.pci for gpu in gpus})


def test_only_neighbours_share_a_bridge():
    assert [4, 0, 0] == [link.nvlinks for link in described("rtx3090:4").gpus[0].links]


def test_the_same_words_always_give_the_same_gpus():
    assert described("h100:8") == described("h100:8")
    assert described("h100:8").gpus[0].uuid != described("a100:8").gpus[0].uuid


def test_a_profile_alone_is_one_gpu_and_zero_is_a_node_without():
    assert 1 == len(described("t4").gpus)
    assert () == described("h100:0").gpus


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("h1000:8", "there is no profile `h1000`; use h100, a100, t4, rtx3090"),
        ("node.yaml", "there is no profile `node.yaml`"),
        ("h100:", "`` is not a number up to 64"),
        ("h100:-1", "`-1` is not a number up to 64"),
        ("h100:65", "`65` is not a number up to 64"),
        ("h100:8x", "`8x` is not a number up to 64"),
    ],
)
def test_what_is_no_model_or_no_number_is_refused(spec, words):
    with pytest.raises(SettingsError, match=words):
        described(spec)
