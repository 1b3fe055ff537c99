"""How a container is told its GPUs, against HAMi v2.10 where its vectors speak."""

import itertools

import msgspec
import pytest

from agent.allocate.edits import container_edits, looks_up_cdi, undefined
from agent.ledger import STRATEGIES, ContainerEdits, ContainerKey, EditSettings, HookFacts
from tests.builders import G1, G2, POD_UID, a_granted_share, a_share
from tests.hami_vectors import Vector, cases

FACTS = HookFacts(library="/usr/local/vgpu/libvgpu.so", device_nodes=("/dev/nvidiactl",))
HAMI_KIND = "k8s.device-plugin.nvidia.com/gpu"
SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(STRATEGIES, size)]


def edits_of(settings: EditSettings, *uuids: str, container: str = "main") -> ContainerEdits:
    shares = tuple(
        a_granted_share(a_share(uuid=one), f"0000:{place}0:00.0", 81559, minor=place)
        for place, one in enumerate(uuids, start=1)
    )
    return container_edits(ContainerKey(POD_UID, container), shares, settings, FACTS)


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


# Whether a container runtime finds the GPUs of an answer by their CDI names.

CDI = EditSettings(device_list_strategies=("cdi-cri",))
BOTH = frozenset({f"nvidia.com/gpu={G1}", f"nvidia.com/gpu={G2}"})


def settings(**changes: object) -> EditSettings:
    return msgspec.structs.replace(CDI, **changes)


@pytest.mark.parametrize("strategies", SUBSETS, ids=",".join)
def test_names_are_looked_up_where_any_cdi_strategy_is_among_the_strategies(strategies):
    given = settings(device_list_strategies=strategies)
    expected = any(name.startswith("cdi-") for name in strategies)

    assert expected == looks_up_cdi(given)
    assert expected == (undefined((G1,), given, frozenset()) is not None)


@pytest.mark.parametrize(
    "defined",
    [
        frozenset(),
        {f"nvidia.com/gpu={G2}"},
        {"nvidia.com/gpu=0", "nvidia.com/gpu=1", "nvidia.com/gpu=all"},
        {f"k8s.device-plugin.nvidia.com/gpu={G1}"},
        {f"nvidia.com/mig={G1}", f"management.nvidia.com/gpu={G1}"},
        {G1, f"nvidia.com/gpu={G1}x"},
    ],
)
def test_one_whose_name_is_not_is_named_with_what_to_do(defined):
    found = undefined((G1, G2), CDI, defined)
    assert found is not None
    said, remedy = found

    assert f"in /etc/cdi or /var/run/cdi defines nvidia.com/gpu={G1}" in said
    assert (f"gpu={G2}" in said) == (f"nvidia.com/gpu={G2}" not in defined)
    assert remedy == (
        "write one: nvidia-ctk cdi generate --device-name-strategy=uuid "
        "--output=/var/run/cdi/nvidia.yaml"
    )


def test_the_kind_and_the_directories_of_the_settings_count():
    given = settings(cdi_kind="hami.example.com/vgpu", cdi_spec_dirs=("/var/cdi/static",))
    found = undefined((G1,), given, BOTH)
    assert found is not None

    assert f"/var/cdi/static defines hami.example.com/vgpu={G1}" in found[0]
    assert "--vendor=hami.example.com --class=vgpu" in found[1]
    assert found[1].endswith("=/var/cdi/static/hami.example.com-vgpu.yaml")
    assert undefined((G1,), given, {f"hami.example.com/vgpu={G1}"}) is None


@pytest.mark.parametrize("feature", ["gdrcopy", "gds", "mofed"])
def test_the_names_of_features_are_in_every_answer_and_count_too(feature: str):
    given = settings(**{feature: True})
    found = undefined((G1,), given, BOTH)

    assert found == (
        f"no single CDI specification in /etc/cdi or /var/run/cdi defines nvidia.com/{feature}=all",
        "write one, or switch gdrcopy, gds and mofed off",
    )
    assert undefined((G1,), given, {*BOTH, f"nvidia.com/{feature}=all"}) is None
