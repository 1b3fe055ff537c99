"""Mode mps: HAMi's answer, and the way to a control daemon where the operator runs one."""

from typing import Any

import msgspec
import pytest

from agent.allocate.edits import EditRequest, container_edits, gpu_edits
from agent.ledger import ContainerEdits, EditSettings, GrantedShare, HookFacts, MountEdit
from tests.builders import G1, POD_UID, a_share

FACTS = HookFacts(library="/usr/local/vgpu/libvgpu.so")
SHARES = (GrantedShare(a_share(uuid=G1), "0000:10:00.0", 81559, minor=0),)
PIPES = "/run/nvidia/mps/nvidia.com/gpu/pipe"


def edits_of(**settings: Any) -> ContainerEdits:
    request = EditRequest(POD_UID, "main", control_disabled=False, shares=SHARES)
    return container_edits(request, msgspec.structs.replace(EditSettings(), **settings), FACTS)


def test_without_a_daemons_root_the_mode_changes_no_answer():
    assert edits_of() == edits_of(mode="mps")


@pytest.mark.parametrize("mode", ["hami-core", ""])
def test_in_other_modes_the_root_changes_no_answer(mode: str):
    assert edits_of() == edits_of(mode=mode, mps_root="/run/nvidia/mps")


@pytest.mark.parametrize("root", ["/run/nvidia/mps", "/run/nvidia/mps/"])
@pytest.mark.parametrize("strategy", ["envvar", "cdi-cri"])
def test_with_it_a_container_finds_the_daemons_pipes_and_shares_its_memory(root, strategy):
    plain = edits_of(device_list_strategies=(strategy,))

    edits = edits_of(mode="mps", mps_root=root, device_list_strategies=(strategy,))

    added = dict(edits.envs).items() - dict(plain.envs).items()
    assert {("CUDA_MPS_PIPE_DIRECTORY", "/mps/nvidia.com/gpu/pipe")} == added
    assert (
        MountEdit("/mps/nvidia.com/gpu/pipe", PIPES, read_only=False),
        MountEdit("/dev/shm", "/run/nvidia/mps/shm", read_only=False),  # noqa: S108 -- CUDA's path
        *plain.mounts,
    ) == edits.mounts
    assert sorted(edits.envs) == list(edits.envs)


def test_hami_cores_limits_stay_beside_the_daemon():
    names = {
        "CUDA_DEVICE_MEMORY_LIMIT_0",
        "CUDA_DEVICE_SM_LIMIT",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE",
    }

    assert names <= dict(edits_of(mode="mps", mps_root="/mps").envs).keys()


def test_each_resource_has_a_daemon_of_its_own():
    settings = EditSettings(mode="mps", mps_root="/mps", resource="example.com/shared")

    edits = gpu_edits("a/b", SHARES, settings, FACTS)

    assert "/mps/example.com/shared/pipe" == dict(edits.envs)["CUDA_MPS_PIPE_DIRECTORY"]
