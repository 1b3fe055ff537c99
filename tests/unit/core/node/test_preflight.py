"""What `doctor --pre` makes of what it saw: each thing that is wrong, and that a note is none."""

import msgspec
import pytest

from agent.cluster import REGISTER
from agent.ledger import EditSettings
from agent.model import GpuFault, Scan
from agent.node.findings import Finding, PreflightCheck, PreflightVerdict
from agent.node.preflight import (
    ClusterAnswer,
    PathFacts,
    PluginSocket,
    Right,
    judge_bytecode,
    judge_cdi,
    judge_cluster,
    judge_driver,
    judge_hami_files,
    judge_kubelet,
    judge_library,
    judge_path,
    judge_plugins,
    judge_report,
    judge_witness,
    right_to_get,
    rights,
)
from tests.builders import NODE, a_gpu

DIRECTORY = PathFacts("/d", "directory", mode=0o750, writable=True)
SOCKET = PathFacts("/d/kubelet.sock", "socket")
LABELLED = ClusterAnswer("here", True, {"gpu": "on"})


def verdicts(findings) -> list[tuple[str, str]]:
    return [(one.point.value, one.verdict.value) for one in findings]


def judged(point: PreflightCheck, finding: Finding) -> str:
    assert point is finding.point
    assert (finding.verdict is PreflightVerdict.WRONG) <= bool(finding.advice)
    return finding.verdict.value


@pytest.mark.parametrize(
    ("place", "made", "verdict"),
    [
        (DIRECTORY, False, "ok"),
        (PathFacts("/d", "", writable=True), True, "ok"),
        (PathFacts("/d", ""), True, "WRONG"),
        (PathFacts("/d", ""), False, "WRONG"),
        (PathFacts("/d", "file"), True, "WRONG"),
        (PathFacts("/d", "directory", mode=0o777, writable=True), True, "WRONG"),
        (PathFacts("/d", "directory", mode=0o755), False, "WRONG"),
        (PathFacts("/d", "directory", mode=0o750, writable=True, full=True), True, "WRONG"),
    ],
)
def test_a_directory_must_be_ours_to_write_and_nobody_elses(place, made, verdict):
    assert verdict == judged(PreflightCheck.PATHS, judge_path(place, made=made))


def test_what_each_start_compiles_anew_is_a_note():
    compiled, not_compiled = judge_bytecode("/agent", 0), judge_bytecode("/agent", 2)

    assert "ok" == judged(PreflightCheck.BYTECODE, compiled)
    assert "note" == judged(PreflightCheck.BYTECODE, not_compiled)
    assert "2 modules" in not_compiled.said


@pytest.mark.parametrize(
    ("directory", "socket", "verdict"),
    [
        (DIRECTORY, SOCKET, "ok"),
        (DIRECTORY, PathFacts("/d/kubelet.sock", ""), "WRONG"),
        (DIRECTORY, PathFacts("/d/kubelet.sock", "file"), "WRONG"),
        (PathFacts("/d", ""), SOCKET, "WRONG"),
        (msgspec.structs.replace(DIRECTORY, owner=1000, ours=False), SOCKET, "WRONG"),
        (msgspec.structs.replace(DIRECTORY, mode=0o777), SOCKET, "WRONG"),
    ],
)
def test_the_kubelet_must_be_there(directory, socket, verdict):
    assert verdict == judged(PreflightCheck.KUBELET, judge_kubelet(directory, socket))


@pytest.mark.parametrize(
    ("held", "asks", "verdict", "said"),
    [
        (0, True, "ok", "0 containers hold"),
        (1, True, "ok", "1 container holds slices"),
        (3, True, "ok", "takes them over"),
        (0, False, "note", "cannot say which pod"),
        (None, True, "WRONG", "no answer"),
    ],
)
def test_containers_of_another_plugin_are_told_of(held, asks, verdict, said):
    finding = judge_witness("/s", held, "no answer", asks=asks)

    assert verdict == judged(PreflightCheck.WITNESS, finding)
    assert said in finding.said


def test_one_gpu_is_told_in_the_singular():
    (found,) = judge_driver("NVML", Scan("570", (a_gpu(),)), "")

    assert "driver 570, 1 GPU: " in found.said


def test_a_gpu_that_will_not_be_shared_is_a_note():
    fault = GpuFault("index 2", "fell off the bus")
    scan = Scan("570", (a_gpu(), a_gpu(mig_enabled=True)), (fault,))

    found = list(judge_driver("NVML", scan, ""))

    assert [("P-DRIVER", "ok"), ("P-DRIVER", "note"), ("P-DRIVER", "note")] == verdicts(found)
    assert "driver 570, 2 GPUs" in found[0].said


@pytest.mark.parametrize(("scan", "said"), [(None, "no library"), (Scan("570", ()), "no GPU")])
def test_no_gpu_is_wrong(scan, said):
    (finding,) = judge_driver("NVML", scan, "no library" if scan is None else "")

    assert "WRONG" == judged(PreflightCheck.DRIVER, finding)
    assert said in finding.said


def test_a_driver_that_fails_is_mended_and_not_installed():
    (finding,) = judge_driver("NVML", None, "Unknown Error")

    assert "dmesg" in finding.advice
    assert "install" not in finding.advice


def test_a_remedy_is_given_once_where_the_failure_says_it_and_where_it_does_not():
    (driver,) = judge_driver("NVML", None, "it is not found", "install it")
    (node,) = judge_cluster(NODE, ClusterAnswer("here", failure="no file", remedy="name one"))

    assert ("install it", "name one") == (driver.advice, node.advice)
    assert all(one.advice for one in judge_driver("NVML", None, "no answer"))
    assert all(one.advice for one in judge_cluster(NODE, ClusterAnswer("here", failure="refused")))


@pytest.mark.parametrize(
    ("missing", "needed", "verdict"),
    [((), True, "ok"), (("libvgpu.so",), True, "WRONG"), (("libvgpu.so",), False, "ok")],
)
def test_the_library_must_be_there_where_it_is_needed(missing, needed, verdict):
    assert verdict == judged(PreflightCheck.LIBRARY, judge_library("/h", missing, needed=needed))


@pytest.mark.parametrize(
    ("defined", "verdict"),
    [
        (None, "unknown"),
        (frozenset(), "WRONG"),
        ({f"nvidia.com/gpu={a_gpu(index=0).uuid}"}, "WRONG"),
        ({f"nvidia.com/gpu={a_gpu(index=number).uuid}" for number in range(2)}, "ok"),
    ],
)
def test_the_cdi_names_of_all_gpus_must_be_defined(defined, verdict):
    gpus = [a_gpu(index=number).uuid for number in range(2)]
    finding = judge_cdi(gpus, EditSettings(device_list_strategies=("cdi-cri",)), defined)

    assert verdict == judged(PreflightCheck.CDI, finding)
    assert "/etc/cdi, /var/run/cdi" == finding.subject
    assert (verdict == "WRONG") == ("nvidia-ctk cdi generate" in finding.advice)


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (LABELLED, [("P-NODE", "ok"), ("P-LABEL", "ok"), ("P-RIGHTS", "ok")]),
        (ClusterAnswer("here", True), [("P-NODE", "ok"), ("P-LABEL", "note"), ("P-RIGHTS", "ok")]),
        (ClusterAnswer("here", False), [("P-NODE", "WRONG"), ("P-RIGHTS", "ok")]),
        (ClusterAnswer("here", failure="refused"), [("P-NODE", "WRONG")]),
        (ClusterAnswer("here", denied=(Right("patch", "nodes"),)), [("P-RIGHTS", "WRONG")]),
        (
            ClusterAnswer("here", False, unasked=(Right("patch", "nodes"),)),
            [("P-NODE", "WRONG"), ("P-RIGHTS", "note")],
        ),
    ],
)
def test_what_the_api_server_says_is_judged_part_by_part(cluster, expected):
    assert expected == verdicts(judge_cluster(NODE, cluster))


def test_a_right_that_is_denied_is_named():
    (finding,) = judge_cluster(NODE, ClusterAnswer("here", denied=(Right("patch", "pods/status"),)))

    assert "patch pods/status" in finding.said


def test_the_rights_on_nodes_are_asked_for_this_one_alone():
    assert {NODE} == {right.name for right in rights(NODE) if right.resource == "nodes"}


def test_a_pod_is_asked_for_by_its_name():
    right = right_to_get(("team-a", "one"))

    assert ("get pods", "team-a", "one") == (right.words, right.namespace, right.name)
    assert right.reads


def test_the_right_to_a_condition_is_asked_for_where_it_is_kept():
    more = set(rights(NODE, node_condition=True)) - set(rights(NODE))

    assert {Right("patch", "nodes/status", name=NODE)} == more


PLUGINS = PathFacts("/d", "directory", writable=True)
HAMI = PluginSocket("/d/nvidia-gpu.sock", alive=True)
LEFT = PluginSocket("/d/nvidia-gpu.sock", alive=False)
OTHER = PluginSocket("/d/rdma.sock", alive=True)


@pytest.mark.parametrize(
    ("sockets", "cluster", "expected"),
    [
        ([], None, [("P-PLUGIN", "ok")]),
        ([OTHER], LABELLED, [("P-PLUGIN", "ok")]),
        ([LEFT], None, [("P-PLUGIN", "note"), ("P-PLUGIN", "ok")]),
        ([HAMI], None, [("P-PLUGIN", "WRONG"), ("P-MONITOR", "note")]),
        (
            [],
            ClusterAnswer("here", True, plugins=("hami/hami-device-plugin-x",)),
            [("P-PLUGIN", "WRONG"), ("P-MONITOR", "note")],
        ),
        (
            [],
            ClusterAnswer("here", True, annotations={REGISTER: "[]"}),
            [("P-PLUGIN", "ok"), ("P-MONITOR", "note")],
        ),
    ],
)
def test_another_plugin_is_found_by_its_pod_or_its_socket(sockets, cluster, expected):
    assert expected == verdicts(judge_plugins(PLUGINS, sockets, cluster, takeover=False))


def test_of_a_directory_that_is_not_there_nothing_is_said():
    assert [] == verdicts(judge_plugins(PathFacts("/d", ""), [], LABELLED, takeover=False))


def test_another_plugin_is_no_obstacle_where_the_agent_is_to_take_over():
    cluster = ClusterAnswer("here", True, plugins=("hami/hami-device-plugin-x",))

    found = list(judge_plugins(PLUGINS, [HAMI], cluster, takeover=True))

    assert [("P-PLUGIN", "note"), ("P-PLUGIN", "note"), ("P-MONITOR", "note")] == verdicts(found)
    assert "right after" in found[0].advice


@pytest.mark.parametrize(
    ("differences", "verdict", "said"),
    [
        ([], "ok", "says what the agent would write"),
        (["A: slices 5"], "note", "A: slices 5"),
        (["A: slices 5", "B: slices 5"], "note", "A: slices 5, and 1 more"),
    ],
)
def test_what_the_node_says_otherwise_is_a_note(differences, verdict, said):
    finding = judge_report(NODE, differences)

    assert verdict == judged(PreflightCheck.REPORT, finding)
    assert said == finding.said


def test_what_goes_with_hamis_plugin_is_said_before_it_goes():
    *_, finding = judge_plugins(PLUGINS, [HAMI], None, takeover=False)

    assert all(word in finding.said for word in ("vGPUmonitor", "31992"))


@pytest.mark.parametrize(
    ("files", "names", "verdict", "said"),
    [
        ({"/a": True, "/b": False}, [], "ok", "read"),
        ({"/a": True}, [NODE], "ok", f"{NODE} is named"),
        ({"/a": True}, ["your-node-name"], "ok", "is not among the nodes named"),
        ({"/a": False}, [], "note", "own settings"),
        ({}, [], "note", "own settings"),
    ],
)
def test_it_is_said_whether_hamis_files_are_used(files, names, verdict, said):
    finding = judge_hami_files(files, NODE, names)

    assert verdict == judged(PreflightCheck.HAMI_FILES, finding)
    assert said in finding.said


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (msgspec.structs.replace(DIRECTORY, mode=0o777), "every user may write there (mode 0777)"),
        (msgspec.structs.replace(DIRECTORY, owner=7, ours=False), "belongs to uid 7"),
    ],
)
def test_a_directory_of_another_user_or_of_all_is_wrong(place, said):
    for finding in (judge_path(place, made=True), judge_kubelet(place, SOCKET)):
        assert said == finding.said
        assert "WRONG" == finding.verdict.value
        assert "chown root and chmod 0755 /d" == finding.advice


@pytest.mark.parametrize("files", [{}, {"/a": False}, {"/a": False, "/b": True}])
@pytest.mark.parametrize("needed", [True, False])
def test_it_is_noted_where_no_annotation_is_checked_against_requests(files, needed):
    finding = judge_hami_files(files, NODE, [], needed=needed, unchecked=True)

    assert "note" == judged(PreflightCheck.HAMI_FILES, finding)
    assert "annotations are not checked against what their pods request" in finding.said
    assert finding.advice.endswith("mount its ConfigMaps")


def test_a_running_agent_needs_no_files_of_hami():
    finding = judge_hami_files({"/c.json": False}, NODE, [], needed=False)

    assert ("ok", "/c.json") == (judged(PreflightCheck.HAMI_FILES, finding), finding.subject)


def test_the_containers_of_a_running_agent_are_its_own():
    finding = judge_witness("/s", 2, "", asks=True, serving=True)

    assert "the kubelet answers, and 2 containers hold slices" == finding.said
