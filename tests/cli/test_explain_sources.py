"""`explain` and its source: rights, names, sizes, contexts, forms, and text that is not ours."""

import os
from pathlib import Path

import pytest

from agent.cli.main import dispatch
from agent.errors import ApiError, ApiForbidden
from agent.hami.annotations import encode_stamp
from agent.kube.client import ApiRequest, KubeSession
from tests.fakes.explain_rig import ExplainRig, a_gpu

pytestmark = pytest.mark.looptime(False)

GPU, MEMORY = "nvidia.com/gpu", "nvidia.com/gpumem"


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


async def test_300_nodes_are_answered_with_few_of_them(rig):
    for number in range(300):
        name = f"n{number:04}"
        rig.node(name, a_gpu(f"GPU-{name}"))
    for number in range(100):
        name = f"n{number:04}"
        rig.holder(f"h{number:04}", name, f"GPU-{name}", 15_000)
    rig.submit("p", {GPU: 1, MEMORY: 20_000})

    answer = await rig.explain("p")

    assert ("placement", "CardInsufficientMemory") == answer.blocked
    assert {"CardInsufficientMemory": 300} == answer.data["nodesByReason"]
    assert 20 == len(answer.data["nodes"])
    assert (
        "ask for at most 16,000 MiB (nvidia.com/gpumem) instead of 20,000 MiB"
        == (answer.changes[0])
    )
