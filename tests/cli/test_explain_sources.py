"""`explain` and its source: rights, names, sizes, contexts, forms, and text that is not ours."""

import os
from pathlib import Path

import pytest

from agent.cli.main import dispatch
from agent.errors import ApiError, ApiForbidden
from agent.hami.annotations import encode_stamp
from agent.kube.client import ApiRequest, KubeSession
from tests.fakes.explain_rig import EXPLAIN_RIGHTS, REGISTER, ExplainRig, a_gpu, explain_rig

pytestmark = pytest.mark.looptime(False)

GPU, MEMORY = "nvidia.com/gpu", "nvidia.com/gpumem"
Capsys = pytest.CaptureFixture[str]


async def test_the_five_rights_that_the_help_names_are_enough(tmp_path, capsys):
    async with explain_rig(tmp_path, capsys, EXPLAIN_RIGHTS) as rig:
        rig.node("n1", a_gpu("GPU-a"))
        rig.submit("p", {GPU: 1, MEMORY: 1000})

        answer = await rig.explain("p")

        assert (0, []) == (answer.code, answer.data["missing"])
        assert {"get", "list"} == {call.verb for call in rig.model.journal.calls}


@pytest.mark.parametrize("resource", ["nodes", "pods", "events", "resourcequotas"])
async def test_a_missing_right_is_named_and_the_rest_is_told(resource, tmp_path, capsys):
    async with explain_rig(tmp_path, capsys, EXPLAIN_RIGHTS - {("list", resource)}) as rig:
        rig.node("n1", a_gpu("GPU-a"))
        rig.submit("p", {GPU: 1, MEMORY: 1000})

        answer = await rig.explain("p")

        assert 5 == answer.code
        (missing,) = answer.data["missing"]
        assert f"list {resource} (/api/v1/" in missing
        assert "passed" == answer.gate("admission")["verdict"]
        text = (await rig.explain("p", "-o", "table")).out
        assert f"missing: {missing}" in " ".join(text.split())


async def test_a_server_that_falls_silent_is_not_asked_for_the_rest(rig, monkeypatch):
    plain = KubeSession.call

    async def call(session: KubeSession, request: ApiRequest, *limits: int) -> bytearray:
        if request.verb == "list":
            raise ApiError("list: no answer from the API server")
        return await plain(session, request, *limits)

    monkeypatch.setattr(KubeSession, "call", call)
    rig.submit("p", {GPU: 1, MEMORY: 1000})

    answer = await rig.explain("p")

    silent = "not asked, because the API server fell silent"
    assert 5 == answer.code
    assert ["nodes: list: no answer from the API server"] == answer.data["missing"][:1]
    assert [f"{part}: {silent}" for part in ("pods", "resourcequotas", "events")] == (
        answer.data["missing"][1:]
    )
    assert "unknown" == answer.gate("placement")["verdict"]


@pytest.fixture
def lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rights in one namespace, as a Role gives them."""
    plain = KubeSession.call

    async def call(session: KubeSession, request: ApiRequest, *limits: int) -> bytearray:
        if "/namespaces/default/" not in request.path:
            raise ApiForbidden("list: 403", status=403)
        return await plain(session, request, *limits)

    monkeypatch.setattr(KubeSession, "call", call)


@pytest.mark.usefixtures("lead")
async def test_rights_in_one_namespace_are_enough_for_the_words_of_schedulers_and_the_quota(rig):
    rig.node("n1", a_gpu("GPU-a"))
    rig.holder("held", "n1", "GPU-a", 3000)
    rig.submit("p", {GPU: 1, MEMORY: 15_000})
    hard = {"limits.nvidia.com/gpumem": "50000"}
    metadata = {"name": "team", "namespace": "default"}
    rig.store.create("resourcequotas", {"metadata": metadata, "spec": {"hard": hard}})
    async with rig.scheduling():
        await rig.until_told("p", "FilteringFailed")

    answer = await rig.explain("p")

    assert (5, ("placement", "CardInsufficientMemory")) == (answer.code, answer.blocked)
    assert ["nodes", "pods"] == [text.partition(":")[0] for text in answer.data["missing"]]
    assert ["team: 3,000 MiB of 50,000 MiB are held"] == answer.gate("quota")["facts"]


@pytest.mark.parametrize("is_healthy", [True, False])
async def test_what_agents_say_of_nodes_is_read_where_a_node_does_not_offer_all_its_gpus(
    rig, *, is_healthy
):
    rig.node("n1", a_gpu("GPU-a", healthy=is_healthy))
    rig.submit("p", {GPU: 1, MEMORY: 99_000})
    rig.store.create(
        "events",
        {
            "metadata": {"name": "e", "namespace": "default"},
            "involvedObject": {"kind": "Node", "name": "n1"},
            "reason": "GpuUnhealthy",
            "message": "GPU 0: XID 48 [H-048]",
            "source": {"component": "hami-agent"},
            "lastTimestamp": encode_stamp(rig.now(-30)),
        },
    )

    (node,) = (await rig.explain("p")).data["nodes"]

    assert is_healthy == ("GpuUnhealthy: GPU 0: XID 48 [H-048]" not in "".join(node["events"]))


async def test_a_pod_that_is_unknown_or_may_not_be_read_has_no_answer(tmp_path, capsys):
    for rights, code, said in (
        (frozenset(), 3, "get pods (/api/v1/namespaces/default/pods/p)"),
        (EXPLAIN_RIGHTS, 4, "there is no pod p in the namespace default"),
    ):
        async with explain_rig(tmp_path, capsys, rights) as rig:
            answer = await rig.explain("p")

        assert (code, "") == (answer.code, answer.out)
        assert said in answer.err
        assert 1 == len(answer.err.splitlines())


def owned(rig: ExplainRig, name: str, kind: str, owner: str, phase: str, node: str = "") -> None:
    references = [{"apiVersion": "v1", "kind": kind, "name": owner, "uid": owner}]
    rig.submit(name, {GPU: 1}, metadata={"ownerReferences": references})
    rig.edit_pod(name, {"spec": {"nodeName": node}, "status": {"phase": phase}})


@pytest.mark.parametrize(
    ("word", "pod"),
    [
        ("deployment/web", "web-2"),
        ("deploy/web-api", "api"),
        ("statefulsets/db", "db-0"),
        ("rs/web-6f", "web-2"),
        ("job/once", "once-x"),
        ("job/twice", "twice-b"),
        ("ds/all", "all-b"),
        ("cronjob/nightly", "nightly-1-x"),
    ],
)
async def test_of_a_workload_the_pod_that_is_furthest_from_running_is_explained(rig, word, pod):
    for name, kind, owner, phase, node in (
        ("web-1", "ReplicaSet", "web-6f", "Running", "n1"),
        ("web-2", "ReplicaSet", "web-6f", "Pending", ""),
        ("web-3", "ReplicaSet", "web-6f", "Pending", "n1"),
        ("api", "ReplicaSet", "web-api-77", "Running", "n1"),
        ("db-0", "StatefulSet", "db", "Pending", "n1"),
        ("db-1", "StatefulSet", "db", "Failed", "n1"),
        ("once-x", "Job", "once", "Succeeded", "n1"),
        ("nightly-1-x", "Job", "nightly-1", "Failed", "n1"),
        ("twice-a", "Job", "twice", "Succeeded", "n1"),
        ("twice-b", "Job", "twice", "Running", "n1"),
        ("all-a", "DaemonSet", "all", "Pending", "n1"),
        ("all-b", "DaemonSet", "all", "Running", "n1"),
        ("other", "Job", "other", "Pending", ""),
    ):
        owned(rig, name, kind, owner, phase, node)
    rig.edit_pod("all-a", {"metadata": {"deletionTimestamp": encode_stamp(rig.now())}})

    text = (await rig.explain(word, "-o", "table")).out

    assert f"Pod default/{pod} is " in text
    assert 4 == (await rig.explain("daemonset/web")).code


async def test_the_namespace_may_be_a_word_an_option_or_the_context_s(rig):
    rig.submit("p", {GPU: 1}, metadata={"namespace": "a"})
    text = rig.kubeconfig.read_text().replace("user: u}", "user: u, namespace: a}")

    assert 4 == (await rig.explain("p")).code
    for words in (("a/p",), ("p", "-n", "a"), ("p", "--namespace", "a")):
        assert "a" == (await rig.explain(*words)).data["namespace"]
    rig.kubeconfig.write_text(text)
    assert "a" == (await rig.explain("p")).data["namespace"]
    assert 2 == (await rig.explain("a/b/c")).code


@pytest.mark.parametrize(
    "verb",
    [
        *(("explain", "p"), ("explain", "p", "-n=a")),
        *(("status", "--node=n"), ("cordon", "0", "--node=n")),
    ],
)
@pytest.mark.parametrize(
    "make",
    [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")],
    ids=["pipe", "directory", "device"],
)
def test_a_kubeconfig_that_is_no_regular_file_is_refused_at_once(verb, make, tmp_path, capsys):
    path = tmp_path / "kubeconfig"
    make(path)

    assert 3 == dispatch([*verb, "--kubeconfig", str(path)], {})
    said = "kubeconfig: is not a regular file: give --kubeconfig, or set KUBECONFIG\n"
    assert capsys.readouterr().err.endswith(said)


async def test_1500_nodes_are_read_in_pages_and_answered_with_few_of_them(rig):
    for number in range(1500):
        name = f"n{number:04}"
        rig.node(name, a_gpu(f"GPU-{name}"))
    for number in range(700):
        name = f"n{number:04}"
        rig.holder(f"h{number:04}", name, f"GPU-{name}", 15_000)
    rig.submit("p", {GPU: 1, MEMORY: 20_000})
    rig.model.journal.calls.clear()

    answer = await rig.explain("p")

    calls = [call.resource for call in rig.model.journal.calls]
    assert {"pods": 1 + 2, "nodes": 3, "resourcequotas": 1, "events": 1} == {
        resource: calls.count(resource) for resource in set(calls)
    }
    assert ("placement", "CardInsufficientMemory") == answer.blocked
    assert {"CardInsufficientMemory": 1500} == answer.data["nodesByReason"]
    assert 20 == len(answer.data["nodes"])
    assert (
        "ask for at most 16,000 MiB (nvidia.com/gpumem) instead of 20,000 MiB"
        == (answer.changes[0])
    )


async def test_pods_that_release_2_4_placed_have_no_label_and_count_too(rig):
    report = "GPU-a,10,16000,100,NVIDIA-Tesla T4,0,true:"
    rig.node("n1", annotations={REGISTER: report}, slices=10)
    rig.holder("held", "n1", "GPU-a", 15_000)
    rig.edit_pod("held", {"metadata": {"labels": None}})
    rig.submit("p", {GPU: 1, MEMORY: 2000})

    answer = await rig.explain("p")

    assert ("placement", "CardInsufficientMemory") == answer.blocked
    assert ["default/held 14.6 GiB"] == answer.data["nodes"][0]["biggest"]


async def test_control_characters_of_the_cluster_do_not_reach_the_terminal(rig):
    evil = "x\x1b[31mred\x07"
    rig.node(f"n{evil}", a_gpu("GPU-a", type_name=f"NVIDIA-{evil}"))
    marks = {"nvidia.com/use-gputype": evil + "z", "nvidia.com/use-gpuuuid": evil}
    spec = {"containers": [{"name": evil, "resources": {"limits": {GPU: 1, MEMORY: 1}}}]}
    rig.submit("p", {}, annotations=marks, spec=spec)
    async with rig.scheduling():
        await rig.until_told("p", "FilteringFailed")

    answer = await rig.explain("p", "-o", "table")

    assert 1 == answer.code
    assert [] == [char for char in answer.out if not (char.isprintable() or char == "\n")]
    assert "red" in answer.out


GVISOR = ", not kept: HAMi-core does not work under the runtime class gvisor"


@pytest.mark.parametrize(("spec", "unkept"), [({}, ""), ({"runtimeClassName": "gvisor"}, GVISOR)])
async def test_a_running_pod_is_told_with_what_keeps_its_limits(rig, spec, unkept):
    rig.node("n1", a_gpu("GPU-a", 3))
    rig.holder("p", "n1", "GPU-a", 8192, 20)
    rig.edit_pod("p", {"spec": spec})

    (fact,) = (await rig.explain("p")).gate("running")["facts"]

    assert fact.startswith(f"main: GPU 3 (GPU-a), 8,192 MiB, 20 % of the cores{unkept}")
