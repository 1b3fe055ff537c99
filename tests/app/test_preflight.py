"""`doctor --pre` on a node of models: it sees what is there, and what was taken away."""

import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from agent.cli import doctor
from agent.cli.doctor import NodeSeen, report_differences
from agent.cluster import REGISTER
from agent.hami.register import RegisteredGpu, encode_register
from agent.host.process import SystemClock
from agent.ledger import SourceFile
from agent.model import GpuFault, Scan
from agent.node.findings import CheckGroup, Finding, PreflightCheck, PreflightVerdict
from agent.sandbox.hardware import described
from agent.sandbox.lab.child import child_environment
from agent.sandbox.lab.cluster import LabOptions, SandboxCluster, open_cluster
from agent.settings.schema import Settings
from agent.settings.sources import NodeFacts, Sources
from agent.settings.values import make_plan
from tests.fakes.http import a_session, stream

pytestmark = [pytest.mark.looptime(False), pytest.mark.timeout(60)]

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class PreflightServer:
    """An API server that answers the doctor's three questions, and no other."""

    def __init__(self) -> None:
        self.denied: set[tuple[str, str]] = set()
        self.node: Mapping[str, object] | None = {"gpu": "on"}
        self.annotations: dict[str, str] = {}
        self.pods: list[Mapping[str, object]] = []
        self.asked: list[Mapping[str, object]] = []

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        match request.method, request.path:
            case "POST", path if path == REVIEWS:
                wanted = (await request.json())["spec"]["resourceAttributes"]
                self.asked.append(wanted)
                right = wanted["verb"], wanted["resource"]
                return web.json_response({"status": {"allowed": right not in self.denied}})
            case "GET", "/api/v1/pods":
                return web.json_response({"metadata": {"resourceVersion": "7"}, "items": self.pods})
            case "GET", "/api/v1/nodes":
                return await stream(request, *self._frames())
            case _:
                return web.json_response({}, status=404)

    def _frames(self) -> Iterable[bytes]:
        if self.node is not None:
            metadata = {"name": "n", "uid": "u", "resourceVersion": "7", "labels": self.node}
            metadata |= {"annotations": self.annotations}
            frame = {"type": "ADDED", "object": {"metadata": metadata}}
            yield json.dumps(frame).encode() + b"\n"


@contextlib.asynccontextmanager
async def a_node() -> AsyncIterator[SandboxCluster]:
    """A node with a kubelet and GPUs, and no agent."""
    environ = child_environment(os.environ)  # noqa: TID251 -- for processes that are not started
    async with open_cluster(LabOptions(described("h100:2"), environ)) as cluster:
        yield cluster


def settings(cluster: SandboxCluster, **more: str) -> Settings:
    words = iter(cluster.command()[1:])
    flags = dict(zip(words, words, strict=True)) | more
    return make_plan(Sources(flags=flags, host="host")).settings(NodeFacts())


async def examine(settings: Settings, **more: Any) -> tuple[Finding, ...]:
    return await doctor.examine(NodeSeen(settings, {}, SystemClock(), **more))


async def examined(
    server: PreflightServer, path: Path, *, reader: bool = False, takeover: bool = False
) -> list[Finding]:
    """What is found on a node of that API server."""
    async with a_node() as cluster, a_session(server, path):
        flags = {"--kubeconfig": str(path / "kubeconfig"), "--takeover": str(takeover).lower()}
        return list(await examine(settings(cluster, **flags), reader=reader))


def of(findings: Iterable[Finding], point: str) -> list[str]:
    return [one.verdict.value for one in findings if one.point.value == point]


def wrong(findings: Iterable[Finding]) -> set[str]:
    return {one.point.value for one in findings if one.verdict is PreflightVerdict.WRONG}


async def test_a_node_without_a_fault_has_nothing_wrong(tmp_path: Path):
    server = PreflightServer()
    found = await examined(server, tmp_path)

    assert set() == wrong(found)
    assert ["ok"] == of(found, "P-DRIVER") == of(found, "P-WITNESS") == of(found, "P-PLUGIN")
    assert ["ok"] == of(found, "P-NODE") == of(found, "P-LABEL") == of(found, "P-RIGHTS")


async def test_every_right_is_asked_for_and_one_that_is_missing_told(tmp_path: Path):
    server = PreflightServer()
    server.denied = {("patch", "nodes")}
    found = await examined(server, tmp_path)

    assert {"P-RIGHTS"} == wrong(found)
    assert 8 == len(server.asked)
    assert [] == of(found, "P-NODE")
    assert {"status"} == {str(one["subresource"]) for one in server.asked if "subresource" in one}


async def test_with_a_condition_its_right_is_asked_for_too(tmp_path: Path):
    server = PreflightServer()
    server.denied = {("patch", "nodes")}
    async with a_node() as cluster, a_session(server, tmp_path):
        flags = {"--kubeconfig": str(tmp_path / "kubeconfig")}
        await examine(msgspec.structs.replace(settings(cluster, **flags), node_condition=True))

    assert 9 == len(server.asked)
    assert {("nodes", "status"), ("pods", "status")} == {
        (one["resource"], one["subresource"]) for one in server.asked if "subresource" in one
    }


async def test_an_account_that_only_reads_is_not_asked_for_more(tmp_path: Path):
    server = PreflightServer()
    server.denied = {("patch", "nodes"), ("patch", "pods"), ("create", "events")}
    found = await examined(server, tmp_path, reader=True)

    assert set() == wrong(found)
    assert {"get", "list", "watch"} == {one["verb"] for one in server.asked}
    assert ["ok"] == of(found, "P-NODE") == of(found, "P-LABEL")
    assert ["note"] == of(found, "P-RIGHTS")
    (told,) = [one.said for one in found if one.point is PreflightCheck.RIGHTS]
    assert "patch nodes" in told
    assert "create events" in told


async def test_a_right_to_read_that_is_missing_is_wrong_for_a_reader_too(tmp_path: Path):
    server = PreflightServer()
    server.denied = {("list", "pods")}
    found = await examined(server, tmp_path, reader=True)

    assert {"P-RIGHTS"} == wrong(found)


async def test_the_right_to_get_a_pod_is_asked_for_by_the_name_of_one(tmp_path: Path):
    server = PreflightServer()
    server.pods = [{"metadata": {"namespace": "team-a", "name": "one"}}]
    server.denied = {("get", "pods")}
    found = await examined(server, tmp_path)

    assert {"P-RIGHTS"} == wrong(found)
    (told,) = [one.said for one in found if one.point is PreflightCheck.RIGHTS]
    assert "get pods" in told
    assert [{"verb": "get", "resource": "pods", "name": "one", "namespace": "team-a"}] == [
        one for one in server.asked if ("get", "pods") == (one["verb"], one["resource"])
    ]


async def test_a_node_of_another_name_is_told(tmp_path: Path):
    server = PreflightServer()
    server.node = None
    found = await examined(server, tmp_path)

    assert {"P-NODE"} == wrong(found)


async def test_hamis_plugin_is_found_by_its_pod_and_by_its_socket(tmp_path: Path):
    labels = {"app.kubernetes.io/component": "hami-device-plugin"}
    server = PreflightServer()
    server.pods = [
        {"metadata": {"namespace": "hami", "name": "x", "labels": labels}},
        {"metadata": {"namespace": "a", "name": "web-0"}},
    ]
    async with a_node() as cluster, a_session(server, tmp_path):
        kubeconfig = str(tmp_path / "kubeconfig")
        with socket.socket(socket.AF_UNIX) as theirs:
            theirs.bind(str(cluster.places.plugins / "nvidia-gpu.sock"))
            theirs.listen()
            both = await examine(settings(cluster, **{"--kubeconfig": kubeconfig}))
        server.pods = []
        left = await examine(settings(cluster, **{"--kubeconfig": kubeconfig}))

    assert ["WRONG", "WRONG"] == of(both, "P-PLUGIN")
    assert ["note"] == of(both, "P-MONITOR")
    assert ["note", "ok"] == of(left, "P-PLUGIN")
    assert set() == wrong(left)


async def test_with_takeover_another_plugin_is_a_note(tmp_path: Path):
    server = PreflightServer()
    server.pods = [{"metadata": {"namespace": "hami", "name": "hami-device-plugin-x"}}]
    found = await examined(server, tmp_path, takeover=True)

    assert set() == wrong(found)
    assert ["note"] == of(found, "P-PLUGIN") == of(found, "P-MONITOR")


async def test_what_the_node_says_is_held_against_what_the_agent_would_say(tmp_path: Path):
    server = PreflightServer()
    async with a_node() as cluster, a_session(server, tmp_path):
        kubeconfig = {"--kubeconfig": str(tmp_path / "kubeconfig")}
        assert [] == of(await examine(settings(cluster, **kubeconfig)), "P-REPORT")
        server.annotations[REGISTER] = encode_register(
            RegisteredGpu(
                *(gpu.uuid, gpu.index, 10, 81559, 100, gpu.name, gpu.numa or 0, "hami-core"),
                healthy=True,
            )
            for gpu in described("h100:2").gpus
        )
        same = await examine(settings(cluster, **kubeconfig))
        fewer = await examine(settings(cluster, **kubeconfig, **{"--split-count": "5"}))

    assert ["ok"] == of(same, "P-REPORT")
    (note,) = (one for one in fewer if one.point is PreflightCheck.REPORT)
    assert note.said.endswith(": slices 10, and the agent would say 5, and 1 more")


async def test_an_api_server_that_cannot_be_asked_hides_nothing_else(tmp_path: Path):
    async with a_node() as cluster:
        nowhere = str(tmp_path / "kubeconfig")
        found = await examine(settings(cluster, **{"--kubeconfig": nowhere}))

    assert {"P-NODE"} == wrong(found)
    assert ["ok"] == of(found, "P-KUBELET") == of(found, "P-LIBRARY")
    (told,) = [one for one in found if one.point.value == "P-NODE"]
    assert told.advice.startswith("give the path of a readable kubeconfig")
    assert "readable kubeconfig" not in told.said, "the remedy is said once"


async def test_the_directory_above_hami_core_may_be_read_only_but_not_open_to_all():
    async with a_node() as cluster:
        plain = settings(cluster, **{"--scheduler": "none"})
        cluster.places.hook.chmod(0o555)
        read_only = await examine(plain)
        cluster.places.hook.chmod(0o777)
        open_to_all = await examine(plain)
        cluster.places.hook.chmod(0o755)

    assert set() == wrong(read_only)
    assert {"P-PATHS"} == wrong(open_to_all)


async def test_in_plain_mode_no_api_server_is_asked():
    async with a_node() as cluster:
        found = await examine(settings(cluster, **{"--scheduler": "none"}))

    assert set() == wrong(found)
    assert [] == of(found, "P-NODE") + of(found, "P-RIGHTS")


async def test_an_empty_host_lacks_everything(tmp_path: Path):
    flags = {
        "--scheduler": "none",
        "--nvml-library": str(tmp_path / "none.so"),
        "--kubelet-socket": str(tmp_path / "plugins/kubelet.sock"),
        "--pod-resources-socket": str(tmp_path / "resources.sock"),
        "--hook-path": str(tmp_path / "hook"),
        "--state-dir": str(tmp_path / "state"),
        "--run-dir": str(tmp_path / "run"),
    }
    plan = make_plan(Sources(flags=flags, host="host"))

    found = await examine(plan.settings(NodeFacts()))

    assert {"P-PATHS", "P-LIBRARY", "P-DRIVER", "P-KUBELET", "P-WITNESS"} >= wrong(found)
    assert {"P-PATHS", "P-DRIVER", "P-KUBELET", "P-WITNESS"} <= wrong(found)
    (told,) = [one for one in found if one.point.value == "P-DRIVER"]
    assert told.advice.startswith("correct --nvml-library")
    assert "mend" not in told.said, "the remedy is said once"


def test_a_lost_gpu_that_the_node_still_names_is_no_reason_to_restart_the_agent():
    gpus = described("h100:2").gpus
    text = encode_register(
        RegisteredGpu(
            *(gpu.uuid, gpu.index, 10, 81559, 100, gpu.name, gpu.numa or 0, "hami-core"),
            healthy=gpu.index == 0,
        )
        for gpu in gpus
    )
    chosen = make_plan(Sources(host="host")).settings(NodeFacts())
    silent = Scan("570", gpus[:1])
    lost = msgspec.structs.replace(silent, faults=(GpuFault(gpus[1].uuid, "GPU is lost"),))

    assert () == report_differences(chosen, lost, {REGISTER: text})
    assert report_differences(chosen, silent, {REGISTER: text})


@pytest.mark.parametrize(
    ("more", "environ", "verdict"),
    [
        ({}, {}, "WRONG"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "unknown"),
        ({"--kubeconfig": "/none"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "WRONG"),
    ],
)
async def test_where_there_are_no_cdi_directories_it_matters_whether_this_is_a_pod(
    tmp_path: Path, more: Mapping[str, str], environ: Mapping[str, str], verdict: str
):
    """In a pod they are not mounted, and on the host there is no specification."""
    flags = {
        "--simulate": "h100:1",
        "--scheduler": "none",
        "--device-list-strategy": "cdi-cri",
        "--cdi-spec-dirs": f"{tmp_path}/etc,{tmp_path}/run",
    }
    given = make_plan(Sources(flags={**flags, **more}, host="n")).settings(NodeFacts())
    seen = NodeSeen(given, environ, SystemClock(), frozenset({CheckGroup.DRIVER}))
    findings = await doctor.examine(seen)

    assert [("P-DRIVER", "ok"), ("P-CDI", verdict)] == [
        (one.point.value, one.verdict.value) for one in findings
    ]


async def test_gpus_that_are_not_shared_need_no_cdi_name(tmp_path: Path):
    (tmp_path / "cdi").mkdir()
    flags = {
        "--simulate": "h100:2",
        "--device-list-strategy": "cdi-annotations",
        "--cdi-spec-dirs": f"{tmp_path}/cdi",
    }
    own = SourceFile("c.yaml", b"sharing: {filterIndexes: [0, 1]}")
    given = make_plan(Sources(own=own, flags=flags, host="n")).settings(NodeFacts())
    findings = await examine(given, groups=frozenset({CheckGroup.DRIVER}))

    assert "ok" == findings[-1].verdict.value
