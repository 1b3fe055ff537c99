"""What one container receives, where HAMi's vectors are silent or we differ."""

import ast
import itertools
import re
from typing import Any

import msgspec
import pytest

from agent.allocate.edits import cache_file, container_edits, cuda_order
from agent.errors import Refusal, RefusalReason
from agent.ledger import (
    ContainerEdits,
    ContainerKey,
    EditSettings,
    GrantedShare,
    HookFacts,
    MountEdit,
    container_directory,
)
from tests.builders import G1, G2, POD_UID, a_granted_share, a_share
from tests.hami_vectors import vectors
from tests.unit.rows import rows_of

MAIN = ContainerKey(POD_UID, "main")
FACTS = HookFacts(library="/usr/local/vgpu/libvgpu.so.2.10.0")


def granted(uuid_: str = G1, pci: str = "0000:10:00.0", mib: int = 3000) -> GrantedShare:
    return a_granted_share(a_share(uuid=uuid_, memory_mib=mib), pci, 81559, minor=int(pci[5]))


def edits_of(*shares: GrantedShare, facts: HookFacts = FACTS, **settings: Any) -> ContainerEdits:
    changed = msgspec.structs.replace(EditSettings(), **settings)
    return container_edits(MAIN, shares, changed, facts)


def test_a_second_share_of_one_gpu_takes_no_cuda_index_from_the_others():
    shares = (granted(G1, mib=1), granted(G1, mib=2), granted(G2, "0000:20:00.0", 3))
    assert [1, 3, 2] == [one.share.memory_mib for one in cuda_order(shares)]


BUSES = {
    "in steps": ("0000:10:00.0", "0000:20:00.0", "0000:30:00.0"),
    "one digit and two": ("0000:09:00.0", "0000:0a:00.0", "0000:10:00.0"),
    "several domains": ("0000:f0:00.0", "0001:10:00.0", "0002:01:00.0"),
    "virtual domains": ("ffff:10:00.0", "10000:10:00.0", "20000:01:00.0"),
    "as NVML writes them": ("00000000:0A:00.0", "00000000:1B:00.0", "00000001:02:00.0"),
    "of several forms": ("0000:0A:00.0", "00000000:0b:00.0", "0000:C0:00.0"),
    "by the device": ("0000:10:02.0", "0000:10:0a.0", "0000:10:10.0"),
}


@pytest.mark.parametrize("buses", BUSES.values(), ids=BUSES)
@pytest.mark.parametrize("speeds", list(itertools.permutations(range(3))))
def test_each_gpu_has_its_own_limit_wherever_it_sits(buses, speeds):
    """HAMi-core limits CUDA's device i by CUDA_DEVICE_MEMORY_LIMIT_i.

    CUDA puts the fastest GPU first, unless it is told to number by bus id.
    """
    shares = [
        a_granted_share(a_share(uuid=f"GPU-{n}", memory_mib=1000 + n), bus, 81559)
        for n, bus in enumerate(buses)
    ]
    envs = dict(edits_of(*reversed(shares)).envs)

    cuda = sorted(range(3), key=lambda n: [int(part, 16) for part in re.split("[:.]", buses[n])])
    if envs.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        cuda.sort(key=speeds.__getitem__, reverse=True)
    assert [f"{1000 + n}m" for n in cuda] == [
        envs[f"CUDA_DEVICE_MEMORY_LIMIT_{place}"] for place in range(3)
    ]


def test_with_volume_mounts_each_gpu_is_mounted_once_even_beside_envvar():
    both = ("envvar", "volume-mounts")
    edits = edits_of(granted(), granted(), device_list_strategies=both)
    paths = [one.container_path for one in edits.mounts if one.host_path == "/dev/null"]
    assert [f"/var/run/nvidia-container-devices/{G1}"] == paths
    assert "/var/run/nvidia-container-devices" == dict(edits.envs)["NVIDIA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(
    ("buses", "order"),
    [(BUSES["in steps"], [0, 1, 2]), (("", "0000:10:00.0", "0000:30:00.0"), [1, 2, 0])],
    ids=["the bus", "the index, where a bus is not known"],
)
def test_the_bus_decides_and_not_the_index_that_the_driver_gave_last(buses, order):
    """A GPU that was plugged in has an index at the end until the driver is loaded again."""
    shares = [
        a_granted_share(a_share(uuid=f"GPU-{n}", memory_mib=n), bus, 81559, index=(2, 0, 1)[n])
        for n, bus in enumerate(buses)
    ]

    assert order == [one.share.memory_mib for one in cuda_order(reversed(shares))]


@pytest.mark.parametrize(("setting", "variable"), rows_of(__file__, "variables.txt"))
def test_a_setting_adds_its_variable_and_none_without_it(setting: str, variable: str):
    parts = (part.split("=") for part in setting.split())
    settings = {key: ast.literal_eval(value) for key, value in parts}
    name, value = variable.split("=")

    assert value == dict(edits_of(granted(), **settings).envs)[name]
    plain = edits_of(granted(), cuda_log_level="", memory_scaling=0.5)
    assert name not in dict(plain.envs)


def test_a_container_may_write_neither_hami_core_nor_what_another_one_has_mounted():
    writable = {
        one.container_path: one.host_path for one in edits_of(granted()).mounts if not one.read_only
    }
    own = f"/usr/local/vgpu/containers/{POD_UID}_main"

    assert {"/usr/local/vgpu": own, "/tmp/vgpulock": own} == writable  # noqa: S108 -- HAMi-core's


@pytest.mark.parametrize(
    "name", ["main", "a" * 63, "a.b", "a b", "a=b", "$(X)", "é", "a\n", "\0", ""]
)
@pytest.mark.parametrize(("mib", "cores"), [(0, 0), (1, 100), (2**31 - 1, 7)])
def test_of_what_a_pods_author_writes_only_numbers_reach_the_environment(mib, cores, name):
    """Programs that run as root on the host read it: hooks of the container runtime."""
    share = a_granted_share(a_share(uuid=G1, memory_mib=mib, core_percent=cores), "0000:10:00.0", 7)
    key = ContainerKey(POD_UID, name)
    try:
        envs = dict(container_edits(key, (share,), EditSettings(), FACTS).envs)
    except Refusal:
        return
    assert {
        "CUDA_DEVICE_MEMORY_LIMIT_0": f"{mib or 7}m",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": f"/usr/local/vgpu/{cache_file(POD_UID, name)}",
        "CUDA_DEVICE_SM_LIMIT": str(cores),
        "LIBCUDA_LOG_LEVEL": "1",
        "NVIDIA_VISIBLE_DEVICES": G1,
    } == envs
    assert all(re.fullmatch(r"[\w./-]+", value) for value in envs.values())


def test_device_nodes_lie_below_the_dev_root_of_the_host():
    vector = vectors("allocate")["allocate-179"]
    share = a_granted_share(a_share(uuid=G1), "0000:10:00.0", 81559, minor=0)
    edits = edits_of(share, pass_device_specs=True, dev_root=vector.given["devRoot"])
    assert vector.expected["devices"] == [
        {"container": one.container_path, "host": one.host_path, "permissions": one.permissions}
        for one in edits.nodes
    ]


@pytest.mark.parametrize(
    "bad", ["", ".", "..", "../x", "a/b", "a_b", "A", "-a", "a-", "a" * 64, "a\n"]
)
def test_a_name_that_could_leave_the_directory_is_refused(bad: str):
    for pair in ((POD_UID, bad), (bad, "main")):
        with pytest.raises(Refusal, match="is no") as caught:
            container_directory(*pair)
        assert RefusalReason.HOST_DIRECTORY is caught.value.gate


# Mode mps: HAMi's answer, and the way to a control daemon where the operator runs one.

PIPES = "/run/nvidia/mps/nvidia.com/gpu/pipe"


@pytest.mark.parametrize(
    ("mode", "root"), [("mps", None), ("hami-core", "/run/nvidia/mps"), ("", "/run/nvidia/mps")]
)
def test_without_a_daemons_root_or_in_other_modes_the_answer_is_as_before(mode, root):
    assert edits_of(granted()) == edits_of(granted(), mode=mode, mps_root=root)


@pytest.mark.parametrize("root", ["/run/nvidia/mps", "/run/nvidia/mps/"])
@pytest.mark.parametrize("strategy", ["envvar", "cdi-cri"])
def test_with_it_a_container_finds_the_daemons_pipes_and_shares_its_memory(root, strategy):
    plain = edits_of(granted(), device_list_strategies=(strategy,))

    edits = edits_of(granted(), mode="mps", mps_root=root, device_list_strategies=(strategy,))

    added = dict(edits.envs).items() - dict(plain.envs).items()
    assert {("CUDA_MPS_PIPE_DIRECTORY", "/mps/nvidia.com/gpu/pipe")} == added
    assert (
        MountEdit("/mps/nvidia.com/gpu/pipe", PIPES, read_only=False),
        MountEdit("/dev/shm", "/run/nvidia/mps/shm", read_only=False),  # noqa: S108 -- CUDA's path
        *plain.mounts,
    ) == edits.mounts
    assert sorted(edits.envs) == list(edits.envs)
