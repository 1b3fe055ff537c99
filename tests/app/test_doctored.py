"""`doctor` on a node of models: it sees what is there, and what is not."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent.cli import doctor
from agent.cli.doctor import Finding, NodeSeen
from agent.model import GpuFault, Scan, Trouble
from agent.sandbox.hardware import described
from agent.sandbox.lab.child import child_environment
from agent.sandbox.lab.cluster import LabOptions, SandboxCluster, open_cluster
from agent.settings.reading import Sources, make_plan
from agent.settings.schema import Settings
from agent.witness import FILE_NAME
from tests.builders import a_gpu
from tests.fakes.http import a_session

pytestmark = [pytest.mark.looptime(False), pytest.mark.timeout(60)]

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class PreflightServer:
    """An API server that answers the doctor's three questions, and no other."""

    def __init__(self) -> None:
        self.denied: set[tuple[str, str]] = set()
        self.node: Mapping[str, object] | None = {"gpu": "on"}
        self.pods: list[Mapping[str, object]] = []

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        match request.method, request.path:
            case "POST", path if path == REVIEWS:
                asked = (await request.json())["spec"]["resourceAttributes"]
                right = asked["verb"], asked["resource"]
                return web.json_response({"status": {"allowed": right not in self.denied}})
            case "GET", "/api/v1/pods":
                return web.json_response({"metadata": {"resourceVersion": "7"}, "items": self.pods})
            case "GET", path if self.node is not None and path.startswith("/api/v1/nodes/"):
                name = path.rpartition("/")[2]
                metadata = {"name": name, "uid": "u", "resourceVersion": "7", "labels": self.node}
                return web.json_response({"metadata": metadata})
            case _:
                return web.json_response({}, status=404)


@contextlib.asynccontextmanager
async def a_node() -> AsyncIterator[SandboxCluster]:
    """A node with a kubelet and GPUs, and no agent."""
    environ = child_environment(os.environ)  # noqa: TID251 -- for processes that are not started
    async with open_cluster(LabOptions(described("h100:2"), environ)) as cluster:
        yield cluster


def settings(cluster: SandboxCluster, **more: str) -> Settings:
    words = iter(cluster.command()[1:])
    flags = dict(zip(words, words, strict=True)) | more
    return make_plan(Sources(flags=flags, host="host")).settings()


async def examine(settings: Settings, **more: Any) -> tuple[Finding, ...]:
    return await doctor.examine(NodeSeen(settings, {}, **more))


@contextlib.asynccontextmanager
async def beside_server(
    server: PreflightServer, path: Path, **flags: str
) -> AsyncIterator[tuple[SandboxCluster, Settings]]:
    """A node of that API server, and its settings."""
    async with a_node() as cluster, a_session(server, path):
        yield cluster, settings(cluster, **{"--kubeconfig": str(path / "kubeconfig")}, **flags)


def of(findings: Iterable[Finding], point: str) -> list[str]:
    return [one.verdict for one in findings if one.check == point]


def wrong(findings: Iterable[Finding]) -> set[str]:
    return {one.check for one in findings if one.verdict == "wrong"}


A_POD = {"metadata": {"namespace": "team-a", "name": "one"}}
WRITES = {("patch", "nodes"), ("patch", "pods"), ("create", "events")}
NODE_SEEN = {"P-NODE": ["ok"]}
WELL = ("P-NODE", "P-DRIVER", "P-WITNESS", "P-PLUGIN", "P-RIGHTS")
ALL_WELL = {point: ["ok"] for point in WELL}
NOTED = NODE_SEEN | {"P-RIGHTS": ["note"]}


@pytest.mark.parametrize(
    ("server", "reader", "faults", "lines", "said"),
    [
        ({}, False, set(), ALL_WELL, ()),
        ({"denied": {("patch", "nodes")}}, False, {"P-RIGHTS"}, NODE_SEEN, ("patch nodes",)),
        ({"denied": {("get", "nodes")}}, False, {"P-RIGHTS"}, {"P-NODE": []}, ("get nodes",)),
        ({"denied": {("list", "pods")}}, True, {"P-RIGHTS"}, {}, ("list pods",)),
        ({"denied": WRITES}, True, set(), NOTED, ("patch nodes", "create events")),
        ({"denied": {("get", "pods")}, "pods": [A_POD]}, False, {"P-RIGHTS"}, {}, ("get pods",)),
        ({"node": None}, False, {"P-NODE"}, {}, ()),
    ],
)
async def test_what_the_api_server_says_is_told(tmp_path, server, reader, faults, lines, said):
    model = PreflightServer()
    vars(model).update(server)
    async with beside_server(model, tmp_path) as (_, chosen):
        found = await examine(chosen, reader=reader)
    rights = " ".join(one.said for one in found if one.check == "P-RIGHTS")

    assert faults == wrong(found)
    assert lines == {point: of(found, point) for point in lines}
    assert [] == [word for word in said if word not in rights]


async def test_hamis_plugin_is_found_by_its_socket(tmp_path):
    server = PreflightServer()
    async with beside_server(server, tmp_path) as (cluster, chosen):
        with socket.socket(socket.AF_UNIX) as theirs:
            theirs.bind(str(cluster.places.plugins / "nvidia-gpu.sock"))
            theirs.listen()
            there = await examine(chosen)
            taken = await examine(settings(cluster, **{"--takeover": "true"}))
        left = await examine(chosen)

    assert (["wrong"], ["note"]) == (of(there, "P-PLUGIN"), of(taken, "P-PLUGIN"))
    assert (["ok"], set()) == (of(left, "P-PLUGIN"), wrong(left))


async def test_an_api_server_that_cannot_be_asked_hides_nothing_else(tmp_path):
    async with a_node() as cluster:
        nowhere = str(tmp_path / "kubeconfig")
        found = await examine(settings(cluster, **{"--kubeconfig": nowhere}))

    assert {"P-NODE"} == wrong(found)
    assert ["ok"] == of(found, "P-KUBELET")
    assert {"ok"} == set(of(found, "P-PRELOAD"))
    (told,) = [one for one in found if one.check == "P-NODE"]
    assert told.advice.startswith("give the path of a readable kubeconfig")
    assert "readable kubeconfig" not in told.said, "the remedy is said once"


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b"{"), Path.mkdir])
async def test_a_checkpoint_of_the_kubelet_that_cannot_be_read_is_told_with_its_path(spoil):
    found = []
    async with a_node() as cluster:
        chosen = settings(cluster, **{"--scheduler": "none"})
        place = cluster.places.plugins / FILE_NAME
        place.unlink(missing_ok=True)
        found.append(await examine(chosen))
        spoil(place)
        found.append(await examine(chosen))

    assert [set(), {"P-WITNESS"}] == [wrong(each) for each in found]
    (told,) = [one for one in found[1] if one.verdict == "wrong"]
    assert (str(place), True) == (told.subject, told.said.startswith("cannot be read: "))
    assert "restart the agent" in told.advice


async def test_in_plain_mode_no_api_server_is_asked_and_only_the_host_is_judged():
    """The directory above HAMi-core's may be read-only, but not open to all."""
    found = {}
    async with a_node() as cluster:
        for mode in (0o555, 0o777, 0o755):
            cluster.places.hook.chmod(mode)
            found[mode] = await examine(settings(cluster, **{"--scheduler": "none"}))

    assert [set(), {"P-PATHS"}, set()] == [wrong(each) for each in found.values()]
    assert [] == of(found[0o755], "P-NODE") + of(found[0o755], "P-RIGHTS")
    (told,) = [one.advice for one in found[0o777] if one.verdict == "wrong"]
    assert "chown 0 and chmod 0755" == told, "containers look into it"


@pytest.fixture
def bare(tmp_path: Path) -> Settings:
    """A host in plain mode with nothing on it."""
    (tmp_path / "dev").mkdir()
    flags = {
        "--scheduler": "none",
        "--nvml-library": str(tmp_path / "libnvidia-ml.so.1"),
        "--kubelet-socket": str(tmp_path / "plugins/kubelet.sock"),
        "--pod-resources-socket": str(tmp_path / "resources.sock"),
        "--hook-path": str(tmp_path / "hook"),
        "--state-dir": str(tmp_path / "state"),
        "--run-dir": str(tmp_path / "run"),
    }
    return make_plan(Sources(flags=flags, host="host")).settings()


async def test_an_empty_host_lacks_everything(bare):
    found = await examine(bare)

    assert {"P-PATHS", "P-DRIVER", "P-KUBELET"} == wrong(found) - {"P-LIBRARY"}
    assert [] == of(found, "P-WITNESS"), "it follows from P-KUBELET"
    (told,) = [one for one in found if one.check == "P-DRIVER"]
    assert "correct --nvml-library" in told.advice
    assert "mend" not in told.said, "the remedy is said once"


class ScanningDriver:
    """Each scan finds the next of these faults, the last one again and again, or hangs."""

    def __init__(self, *faults: GpuFault | None) -> None:
        self.faults = list(faults)
        self.scans = 0

    async def scan(self) -> Scan:
        self.scans += 1
        if not self.faults:
            await asyncio.Event().wait()
        found = self.faults.pop(0) if len(self.faults) > 1 else self.faults[0]
        return Scan("570", (a_gpu(),), (found,) if found else ())


LOST = GpuFault("GPU-1", "is lost", Trouble.LOST)
WAKING = GpuFault("index 1", "no answer in time", Trouble.SILENT)


@pytest.mark.parametrize(
    ("driver", "faults", "scans"),
    [
        (ScanningDriver(), {"P-DRIVER"}, 1),
        (ScanningDriver(LOST), {"P-GPU"}, 1),
        (ScanningDriver(WAKING, WAKING, None), set(), 3),
    ],
    ids=["hangs", "a GPU is lost", "a GPU wakes"],
)
async def test_a_driver_has_a_deadline_which_gpus_that_wake_may_use(
    bare, monkeypatch, driver, faults, scans
):
    @contextlib.asynccontextmanager
    async def opened(_):
        yield driver

    monkeypatch.setattr(doctor, "open_driver", opened)
    monkeypatch.setattr(doctor, "DRIVER_SECONDS", 1.0 if driver.faults else 0.1)
    monkeypatch.setattr(doctor, "LOOK_SECONDS", 0.01)
    found = await examine(bare, groups=frozenset({"driver"}))

    assert (faults, scans) == (wrong(found), driver.scans)
