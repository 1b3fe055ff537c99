"""What one container receives: against HAMi v2.10's Allocate, and where its vectors are silent.

How it is told its GPUs, its limits, and whether it loads HAMi-core.
"""

import ast
import copy
import itertools
import re
from typing import Any

import pytest
from msgspec.structs import replace

from agent.allocate.edits import (
    LOCK_DIRECTORY,
    cache_file,
    check_library,
    container_edits,
    cuda_order,
    looks_up_cdi,
    misnamed,
    undefined,
)
from agent.allocate.match import pair_groups
from agent.cluster import TO_ALLOCATE, PodView
from agent.errors import AgentError, Refusal, RefusalReason
from agent.hami.annotations import consume, decode_pod_devices
from agent.kube.objects import decode_pod
from agent.ledger import (
    STRATEGIES,
    ContainerEdits,
    ContainerKey,
    EditSettings,
    GrantedShare,
    HookFacts,
    MountEdit,
    container_directory,
)
from tests.builders import G1, G2, NODE, POD_UID, a_container, a_granted_share, a_share
from tests.hami_vectors import Vector, cases, vectors
from tests.unit.rows import rows_of

GPU = "nvidia.com/gpu"
REGISTERED_MIB = 81559
PLACES = {G1: ("0000:10:00.0", 0), G2: ("0000:20:00.0", 1)}

DIFFERENT = {
    "allocate-160": "what is served decides, not what is consumed: see container order",
    "allocate-164": "the annotation names the GPU; the kubelet's ids only count",
    "allocate-165": "who may be answered without a lock is a setting, decided before",
    "allocate-166": "who may be answered beside a lock is decided before",
    "allocate-167": "no memory means all of it",
    "allocate-168": "the kubelet's ids only count",
    "allocate-179": "device nodes alone, tested below",
}


def pod_of(given: dict[str, Any]) -> PodView:
    """The vector's pod; the k-th container asks for as many slices as the k-th call brings."""
    calls = iter(given["kubeletCalls"])
    spec: dict[str, list[Any]] = {"initContainers": [], "containers": []}
    for part, items in spec.items():
        for item in given[part]:
            limits = {GPU: str(len(next(calls)))}
            items.append({**item, "resources": {"limits": limits}})
    metadata = {"uid": given["podUID"], "name": "p", "annotations": given["podAnnotations"]}
    return decode_pod({"metadata": metadata, "spec": {"nodeName": NODE, **spec}}, GPU)


def answers(given: dict[str, Any]) -> tuple[list[ContainerEdits], str]:
    """All answers to the vector's calls, and the devices text afterwards."""
    settings = EditSettings(
        memory_scaling=given["deviceMemoryScaling"],
        cuda_log_level=given["libCudaLogLevel"],
        disable_core_limit=given["disableCoreLimit"],
        mode=given["mode"],
        device_list_strategies=tuple(given["deviceListStrategy"]),
    )
    facts = HookFacts(
        library="/usr/local/vgpu/libvgpu.so",
        has_license=given["licenseFilePresent"],
        hook_path=given["HOOK_PATH"],
    )
    pod = pod_of(given)
    text = pod.annotations[TO_ALLOCATE]
    pairs = pair_groups(decode_pod_devices(text), pod.containers)
    found: list[ContainerEdits] = []
    for (name, (place, paired)), _ in zip(pairs.items(), given["kubeletCalls"], strict=False):
        view = next(view for view in pod.containers if view.name == name)
        shares = tuple(
            a_granted_share(share, PLACES[share.uuid][0], REGISTERED_MIB, PLACES[share.uuid][1])
            for share in paired
        )
        key, is_disabled = ContainerKey(pod.uid, name), view.control_disabled
        found.append(container_edits(key, shares, settings, facts, control_disabled=is_disabled))
        text = consume(text, {place})
    return found, text


def expected_edits(response: dict[str, Any], edits: ContainerEdits) -> dict[str, Any]:
    """HAMi's response with what differs on purpose put in its place.

    The cache file has no random name, the lock directory is the container's own, and CUDA is told
    how to number several GPUs.
    """
    wanted = copy.deepcopy(response)
    if "," in wanted["envs"]["NVIDIA_VISIBLE_DEVICES"]:
        wanted["envs"]["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    own = next(m.host_path for m in edits.mounts if "/containers/" in m.host_path)
    own = own.rpartition("/")[2]
    uid, _, container = own.partition("_")
    wanted["envs"]["CUDA_DEVICE_MEMORY_SHARED_CACHE"] = (
        f"/usr/local/vgpu/{cache_file(uid, container)}"
    )
    for mount in wanted["mounts"]:
        if mount["container"] == LOCK_DIRECTORY:
            mount["host"] = f"/usr/local/vgpu/containers/{own}"
    return wanted


def as_response(edits: ContainerEdits) -> dict[str, Any]:
    """The edits in the vectors' form."""
    mounts = [
        {"container": one.container_path, "host": one.host_path, "readOnly": one.read_only}
        for one in edits.mounts
    ]
    return {"annotations": None, "envs": dict(edits.envs), "mounts": mounts}


def responses(vector: Vector) -> list[dict[str, Any]]:
    calls = vector.expected["calls"]
    return [response for call in calls for response in call["containerResponses"] or ()]


@pytest.mark.parametrize("vector", cases("allocate", without=DIFFERENT), ids=str)
def test_a_container_gets_what_hami_gives_it_or_is_refused_as_there(vector: Vector):
    if not responses(vector):
        with pytest.raises(AgentError):
            answers(vector.given)
        return
    found, text = answers(vector.given)
    expected = [expected_edits(r, e) for r, e in zip(responses(vector), found, strict=True)]
    assert expected == [as_response(edits) for edits in found]
    # HAMi's text grows by one separator with every container; ours keeps its length.
    after = vector.expected["podAnnotationsAfter"][TO_ALLOCATE]
    assert after == text + ";" * len(found)


# Where the vectors are silent, or we differ.

MAIN = ContainerKey(POD_UID, "main")
FACTS = HookFacts(library="/usr/local/vgpu/libvgpu.so.2.10.0")


def granted(uuid_: str = G1, pci: str = "0000:10:00.0", mib: int = 3000) -> GrantedShare:
    return a_granted_share(a_share(uuid=uuid_, memory_mib=mib), pci, 81559, minor=int(pci[5]))


def edits_of(*shares: GrantedShare, facts: HookFacts = FACTS, **settings: Any) -> ContainerEdits:
    changed = replace(EditSettings(), **settings)
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


# How a container is told its GPUs.

HAMI_KIND = "k8s.device-plugin.nvidia.com/gpu"
SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(STRATEGIES, size)]


def told(given: EditSettings, *uuids: str) -> ContainerEdits:
    shares = (granted(uuid, f"0000:{place}0:00.0") for place, uuid in enumerate(uuids, start=1))
    facts = replace(FACTS, device_nodes=("/dev/nvidiactl",))
    return container_edits(MAIN, tuple(shares), given, facts)


@pytest.mark.parametrize("vector", cases("cdi_response"), ids=str)
def test_cdi_names_are_told_as_hami_tells_them(vector: Vector):
    settings = EditSettings(
        device_list_strategies=tuple(vector.given["deviceListStrategy"]),
        cdi_annotation_prefix=vector.given["cdiAnnotationPrefix"],
        cdi_kind=HAMI_KIND,
    )

    edits = told(settings, *vector.given["devices"])

    assert vector.expected["annotations"] == {
        f"{key[:-36]}<uuid4>": value for key, value in edits.annotations
    }
    assert (vector.expected["cdiDevices"] or []) == list(edits.cdi_names)
    name = "NVIDIA_VISIBLE_DEVICES"
    assert vector.expected["envs"].get(name) == dict(edits.envs).get(name)


def test_with_cdi_alone_the_runtime_gets_neither_device_files_nor_variables():
    whole = EditSettings(
        device_list_strategies=("cdi-cri",),
        pass_device_specs=True,
        gdrcopy=True,
        gds=True,
        mofed=True,
    )

    alone = told(whole, G1)
    beside = told(replace(whole, device_list_strategies=("envvar", "cdi-cri")), G1)

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


def cdi(**changes: object) -> EditSettings:
    return replace(CDI, **changes)


@pytest.mark.parametrize("strategies", SUBSETS, ids=",".join)
def test_names_are_looked_up_where_any_cdi_strategy_is_among_the_strategies(strategies):
    given = cdi(device_list_strategies=strategies)
    expected = any(name.startswith("cdi-") for name in strategies)
    assert expected == looks_up_cdi(given)
    assert expected == (undefined((G1,), given, frozenset()) is not None)


NOT_BOTH = [
    *(set(), {f"nvidia.com/gpu={G2}"}, {"nvidia.com/gpu=0", "nvidia.com/gpu=all"}),
    *({f"{HAMI_KIND}={G1}"}, {f"nvidia.com/mig={G1}"}, {G1, f"nvidia.com/gpu={G1}x"}),
]


@pytest.mark.parametrize("defined", NOT_BOTH)
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
    given = cdi(cdi_kind="hami.example.com/vgpu", cdi_spec_dirs=("/var/cdi/static",))
    found = undefined((G1,), given, BOTH)
    assert found is not None
    assert f"/var/cdi/static defines hami.example.com/vgpu={G1}" in found[0]
    assert "--vendor=hami.example.com --class=vgpu" in found[1]
    assert found[1].endswith("=/var/cdi/static/hami.example.com-vgpu.yaml")
    assert undefined((G1,), given, {f"hami.example.com/vgpu={G1}"}) is None


@pytest.mark.parametrize("feature", ["gdrcopy", "gds", "mofed"])
def test_the_names_of_features_are_in_every_answer_and_count_too(feature: str):
    given = cdi(**{feature: True})
    found = undefined((G1,), given, BOTH)
    assert found == (
        f"no single CDI specification in /etc/cdi or /var/run/cdi defines nvidia.com/{feature}=all",
        "write one, or switch gdrcopy, gds and mofed off",
    )
    assert undefined((G1,), given, {*BOTH, f"nvidia.com/{feature}=all"}) is None


# Whether it loads HAMi-core, by what the agent knows of its two files.


def facts(preload: str | None, hook: str = "/usr/local", **more: object) -> HookFacts:
    return replace(
        HookFacts(f"{hook.rstrip('/')}/vgpu/libvgpu.so", hook_path=hook, preload=preload), **more
    )


def refusal(given: HookFacts, *, disabled: bool = False) -> str:
    try:
        check_library(given, a_container(control_disabled=disabled))
    except Refusal as error:
        return str(error)
    return ""


@pytest.mark.parametrize("hook", ["/usr/local", "/opt/hami", "/"])
@pytest.mark.parametrize(("text", "named"), rows_of(__file__, "preloads.txt"))
def test_a_preload_file_names_the_mounted_path_or_is_refused_with_what_it_names(hook, text, named):
    library = f"{hook.rstrip('/')}/vgpu/libvgpu.so"
    content = ast.literal_eval(f"'{text}'").format(library)
    said = refusal(facts(content, hook))
    if named == "the library":
        assert "" == said
        return
    assert said.endswith(f"{library} its only line. [HA-5005]")
    assert named in said
    assert said.isprintable()


@pytest.mark.parametrize("name", ["/opt//hami/vgpu/libvgpu.so", "//opt/./hami/vgpu/././libvgpu.so"])
def test_another_spelling_of_the_path_is_the_path(name: str):
    assert "" == misnamed(facts(f"{name}\n", "/opt/hami"))
    assert "" == misnamed(facts("/opt/hami/vgpu/libvgpu.so\n", "//opt/hami"))


def test_a_library_that_the_loader_would_ignore_is_refused():
    said = refusal(facts("/usr/local/vgpu/libvgpu.so", loadable=False))
    assert "/usr/local/vgpu/libvgpu.so is empty or no library for this machine" in said
    assert "no limit would be enforced" in said


def test_a_container_that_wants_no_hami_core_needs_only_what_it_mounts():
    """It mounts no ld.so.preload, so it loads nothing; a missing library is still in its way."""
    assert "" == refusal(facts("", loadable=False), disabled=True)
    assert "" == refusal(facts("", missing=("/usr/local/vgpu/ld.so.preload",)), disabled=True)
    assert refusal(facts("", missing=("/usr/local/vgpu/libvgpu.so",)), disabled=True)
