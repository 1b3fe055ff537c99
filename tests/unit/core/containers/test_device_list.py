"""How a container is told its GPUs, against HAMi v2.10 where its vectors speak."""

import itertools
from typing import Any

import msgspec
import pytest

from agent.allocate.edits import STRATEGIES, EditRequest, check_edit_settings, container_edits
from agent.errors import SettingsError
from agent.ledger import ContainerEdits, EditSettings, GrantedShare, HookFacts
from tests.builders import G1, G2, POD_UID, a_share
from tests.hami_vectors import Vector, cases

FACTS = HookFacts(library="/usr/local/vgpu/libvgpu.so", device_nodes=("/dev/nvidiactl",))
HAMI_KIND = "k8s.device-plugin.nvidia.com/gpu"
SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(STRATEGIES, size)]


def edits_of(settings: EditSettings, *uuids: str, container: str = "main") -> ContainerEdits:
    shares = tuple(
        GrantedShare(a_share(uuid=one), f"0000:{place}0:00.0", 81559, minor=place)
        for place, one in enumerate(uuids, start=1)
    )
    request = EditRequest(POD_UID, container, control_disabled=False, shares=shares)
    return container_edits(request, settings, FACTS)


@pytest.mark.parametrize("vector", cases("cdi_response"), ids=str)
def test_cdi_names_are_told_as_hami_tells_them(vector: Vector):
    settings = EditSettings(
        device_list_strategies=tuple(vector.given["deviceListStrategy"]),
        cdi_annotation_prefix=vector.given["cdiAnnotationPrefix"],
        cdi_kind=HAMI_KIND,
    )

    edits = edits_of(settings, *vector.given["devices"])

    assert vector.expected["annotations"] == {
        f"{key[:-36]}<uuid4>": value for key, value in edits.annotations
    }
    assert (vector.expected["cdiDevices"] or []) == list(edits.cdi_names)
    told = "NVIDIA_VISIBLE_DEVICES"
    assert vector.expected["envs"].get(told) == dict(edits.envs).get(told)


@pytest.mark.parametrize("strategies", SUBSETS, ids=",".join)
def test_with_any_strategies_together_each_gpu_is_told_by_each(strategies: tuple[str, ...]):
    edits = edits_of(EditSettings(device_list_strategies=strategies), G1, G2)

    names = f"nvidia.com/gpu={G1},nvidia.com/gpu={G2}"
    assert ("cdi-cri" in strategies) == (names == ",".join(edits.cdi_names))
    assert ("cdi-annotations" in strategies) == (names in dict(edits.annotations).values())
    mounted = [one.container_path[-40:] for one in edits.mounts if one.host_path == "/dev/null"]
    assert ([G1, G2] if "volume-mounts" in strategies else []) == mounted
    by_variable = {"envvar", "volume-mounts"} & set(strategies)
    assert bool(by_variable) == ("NVIDIA_VISIBLE_DEVICES" in dict(edits.envs))


def test_with_cdi_alone_the_runtime_gets_neither_device_files_nor_variables():
    whole = EditSettings(
        device_list_strategies=("cdi-cri",),
        pass_device_specs=True,
        gdrcopy=True,
        gds=True,
        mofed=True,
    )

    alone = edits_of(whole, G1)
    beside = edits_of(
        msgspec.structs.replace(whole, device_list_strategies=("envvar", "cdi-cri")), G1
    )

    modes = ("nvidia.com/gdrcopy=all", "nvidia.com/gds=all", "nvidia.com/mofed=all")
    assert (f"nvidia.com/gpu={G1}", *modes) == alone.cdi_names == beside.cdi_names
    assert () == alone.nodes
    assert ["/dev/nvidiactl", "/dev/nvidia1"] == [one.container_path for one in beside.nodes]
    variables = {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_GDRCOPY", "NVIDIA_GDS", "NVIDIA_MOFED"}
    assert set() == variables & dict(alone.envs).keys()
    assert variables <= dict(beside.envs).keys()


def test_the_annotation_is_the_containers_own_and_always_the_same():
    settings = EditSettings(device_list_strategies=("cdi-annotations",))

    ((one, _),) = edits_of(settings, G1).annotations
    ((again, _),) = edits_of(settings, G2).annotations
    ((other, _),) = edits_of(settings, G1, container="other").annotations

    assert one == again != other
    assert len(one.removeprefix("cdi.k8s.io/")) <= 63


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"cdi_kind": "gpu"}, "CDI kind 'gpu' is not vendor/class"),
        ({"cdi_kind": "nvidia.com/gpu=0"}, "is not vendor/class"),
        ({"cdi_annotation_prefix": "cdi.k8s.io"}, "is not a DNS name with a slash"),
        ({"cdi_annotation_prefix": "a/b/"}, "is not a DNS name"),
    ],
)
def test_a_name_that_no_runtime_reads_is_refused(changed: dict[str, Any], words: str):
    with pytest.raises(SettingsError, match=words):
        check_edit_settings(msgspec.structs.replace(EditSettings(), **changed))
