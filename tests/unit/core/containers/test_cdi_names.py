"""Whether a container runtime finds the GPUs of an answer by their CDI names."""

import itertools

import msgspec
import pytest

from agent.allocate.edits import looks_up_cdi, undefined
from agent.ledger import STRATEGIES, EditSettings
from tests.builders import G1, G2

CDI = EditSettings(device_list_strategies=("cdi-cri",))
BOTH = frozenset({f"nvidia.com/gpu={G1}", f"nvidia.com/gpu={G2}"})
SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(STRATEGIES, size)]


def settings(**changes: object) -> EditSettings:
    return msgspec.structs.replace(CDI, **changes)


@pytest.mark.parametrize("strategies", SUBSETS, ids=",".join)
def test_names_are_looked_up_where_any_cdi_strategy_is_among_the_strategies(strategies):
    given = settings(device_list_strategies=strategies)
    expected = any(name.startswith("cdi-") for name in strategies)

    assert expected == looks_up_cdi(given)
    assert expected == (undefined((G1,), given, frozenset()) is not None)


@pytest.mark.parametrize(
    ("gpus", "defined"),
    [
        ((G1,), BOTH),
        ((G1, G2), BOTH),
        ((G2,), BOTH - {f"nvidia.com/gpu={G1}"}),
        ((G1,), {*BOTH, "nvidia.com/gpu=all", "nvidia.com/gpu=0"}),
        ((G1,), None),
        ((), frozenset()),
    ],
)
def test_a_gpu_whose_name_is_defined_may_be_offered(gpus, defined):
    assert undefined(gpus, CDI, defined) is None


@pytest.mark.parametrize(
    "defined",
    [
        frozenset(),
        {f"nvidia.com/gpu={G2}"},
        {"nvidia.com/gpu=0", "nvidia.com/gpu=1", "nvidia.com/gpu=all"},
        {f"k8s.device-plugin.nvidia.com/gpu={G1}"},
        {f"nvidia.com/mig={G1}", f"management.nvidia.com/gpu={G1}"},
        {f"nvidia.com/gpu={G1.lower()}"},
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


def test_without_directories_nothing_is_looked_up():
    assert not looks_up_cdi(settings(cdi_spec_dirs=()))
    assert undefined((G1,), settings(cdi_spec_dirs=()), frozenset()) is None


@pytest.mark.parametrize(
    ("strategies", "prefix", "expected"),
    [
        (("cdi-annotations",), "nvidia.cdi.k8s.io/", False),
        (("envvar", "cdi-annotations"), "nvidia.cdi.k8s.io/", False),
        (("cdi-annotations",), "cdi.k8s.io/", True),
        (("cdi-annotations", "cdi-cri"), "nvidia.cdi.k8s.io/", True),
    ],
)
def test_devices_that_nvidias_runtime_makes_itself_need_no_specification(
    strategies, prefix, expected
):
    given = settings(
        cdi_kind="runtime.nvidia.com/gpu",
        device_list_strategies=strategies,
        cdi_annotation_prefix=prefix,
    )

    assert expected == looks_up_cdi(given)
    assert looks_up_cdi(msgspec.structs.replace(given, cdi_kind="nvidia.com/gpu"))
