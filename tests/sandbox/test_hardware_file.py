"""Simulated hardware from a profile or a file; what is wrong in a file is named by line."""

from pathlib import Path

import pytest

from agent.core.errors import SettingsError
from agent.core.inventory.gpu import PciPath
from agent.sandbox.hardware_file import described, read_description

UUID = "GPU-8d2f51aa-0001-4000-8000-000000000001"


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        file = tmp_path / "node.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


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
        ("h200:8", "no profile `h200`; use h100, a100, t4, rtx3090"),
        ("h100:x", "`x` is not a number up to 64"),
        ("h100:65", "`65` is not a number up to 64"),
        ("h100:", "`` is not a number"),
        ("h100:-1", "`-1` is not a number"),
        ("/no/such.yaml", "/no/such.yaml: cannot be read: No such file or directory"),
        ("nothing", "nothing: cannot be read"),
    ],
)
def test_a_spec_that_cannot_be_used_says_why(spec, words):
    with pytest.raises(SettingsError) as caught:
        described(spec)

    assert words in str(caught.value)


def test_a_file_says_everything_of_a_gpu(write):
    file = write(f"""
driver_version: 550.54
gpus:
  - uuid: {UUID}
    index: 3
    name: NVIDIA H20
    memory_mib: null
    pci: 0000:18:00.0
    numa: null
    minor: 7
    mig_enabled: true
    links:
      - {{peer: GPU-peer-1, path: single-switch, nvlinks: 18}}
  - {{uuid: GPU-peer-1, name: NVIDIA H20, memory_mib: 97871}}
""")
    hardware = described(str(file))
    peer, gpu = hardware.gpus

    assert ("550.54", [0, 3]) == (hardware.driver_version, [peer.index, gpu.index])
    assert (UUID, None, "0000:18:00.0", None, 7, True) == (
        gpu.uuid,
        gpu.memory_mib,
        gpu.pci,
        gpu.numa,
        gpu.minor,
        gpu.mig_enabled,
    )
    assert [("GPU-peer-1", PciPath.SINGLE_SWITCH, 18)] == [
        (link.peer, link.path, link.nvlinks) for link in gpu.links
    ]


def test_a_profile_in_a_file_brings_links_among_its_own_gpus(write):
    gpus = read_description(write("gpus:\n- {profile: h100, count: 2}\n- profile: t4\n")).gpus

    assert [0, 1, 2] == [gpu.index for gpu in gpus]
    assert [gpus[1].uuid] == [link.peer for link in gpus[0].links]
    assert () == gpus[2].links
    assert gpus == read_description(write("gpus: [{profile: h100, count: 2}, {profile: t4}]")).gpus


def test_an_empty_list_is_a_node_without_gpus(write):
    assert () == read_description(write("gpus: []")).gpus


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu: []", ":1: unknown key `gpu`; known keys are driver_version, gpus"),
        ("driver_version: '1'", ":1: `gpus` is missing"),
        ("gpus: 3", ":1:7: gpus: a list is expected here, not `3`"),
        ("gpus:\n- 3", ":2:3: gpus[0]: keys and values are expected here"),
        ("gpus:\n- profile: h100\n  colour: red", ":3:3: gpus[0]: unknown key `colour`"),
        ("gpus:\n- {profile: h100, profile: t4}", "`profile` stands here twice"),
        ("gpus:\n- count: 2", ":2:3: gpus[0]: `name` or `profile` is needed"),
        ("gpus:\n- name: X", "`memory_mib` is needed"),
        ("gpus:\n- profile: h999", "gpus[0].profile: there is no profile `h999`"),
        ("gpus:\n- {profile: t4, memory_mib: lots}", "a whole number is expected, not `lots`"),
        ("gpus:\n- {profile: t4, memory_mib: 0}", "memory_mib: `0` is not between 1 and"),
        ("gpus:\n- {profile: t4, memory_mib: [1]}", "a whole number is expected, not a list"),
        ("gpus:\n- {profile: t4, numa: {a: 1}}", "not a mapping"),
        ("gpus:\n- {profile: t4, mig_enabled: 1}", "true or false is expected, not `1`"),
        ("gpus:\n- {profile: t4, name: 5}", "text is expected, not `5`"),
        ("gpus:\n- {profile: t4, name: }", "text is expected, not nothing"),
        ("gpus:\n- {profile: t4, pci: [1]}", "text is expected, not a list"),
        ("gpus:\n- {profile: t4, pci: 1b.0}", "`1b.0` is not a PCI address"),
        ("gpus:\n- {profile: t4, uuid: MIG-1}", "`MIG-1` is not a GPU UUID"),
        ("gpus:\n- {profile: t4, count: 0}", "`0` is not between 1 and 64"),
        ("gpus:\n- {profile: t4, count: 2, minor: 1}", "2 GPUs cannot share it"),
        ("gpus:\n- {profile: t4, count: 60}\n- {profile: t4, count: 5}", "more than 64 GPUs"),
        (
            "gpus:\n- {profile: t4, index: 1}\n- {profile: t4, index: 1}",
            ":3:24: gpus[1].index: index 1 is already used in line 2",
        ),
        (
            f"gpus:\n- {{profile: t4, uuid: {UUID}}}\n- {{profile: t4, uuid: {UUID}}}",
            f"uuid {UUID} is already used in line 2",
        ),
        ("gpus:\n- {profile: t4, links: [{}]}", "`peer` is needed"),
        ("gpus:\n- {profile: t4, links: [{peer: GPU-other}]}", "is the UUID of no GPU"),
        ("gpus:\n- {profile: t4, links: [{peer: GPU-a1b2, path: x}]}", "`x` is no PCI path"),
        ("driver_version: latest\ngpus: []", "`latest` is not digits and dots"),
        ("gpus: [", ": not valid YAML"),
        ("", "is empty"),
        ("gpus: \x07", "not valid YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_by_line_and_field(write, text, words):
    file = write(text)
    with pytest.raises(SettingsError) as caught:
        read_description(file)

    assert str(caught.value).startswith(str(file))
    assert words in str(caught.value)


def test_a_file_that_is_not_text_says_so(tmp_path):
    file = tmp_path / "node.yaml"
    file.write_bytes(b"gpus: \xff")
    with pytest.raises(SettingsError, match=r"is not UTF-8 text \(byte 6\)"):
        read_description(file)
