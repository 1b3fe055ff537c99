"""`doctor` on a node of models, and over the C stub: it sees what is there, and what is not."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from agent.cli import doctor
from agent.cli.checks import ALL_GROUPS, AgentAnswer, Finding
from agent.cli.doctor import NodeSeen, report_differences
from agent.cluster import REGISTER
from agent.hami.annotations import RegisteredGpu, encode_register
from agent.ledger import Holding
from agent.model import GpuFault, Scan
from agent.node import Check
from agent.sandbox.hardware import described
from agent.sandbox.lab.child import child_environment
from agent.sandbox.lab.cluster import LabOptions, SandboxCluster, open_cluster
from agent.settings.reading import Sources, make_plan
from agent.settings.schema import Settings
from agent.witness import PodResourcesWitness
from tests.fakes.http import a_session

pytestmark = [
    pytest.mark.looptime(False),
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("forgetful"),
]

RESOURCE = "nvidia.com/gpu"
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
                asked = (await request.json())["spec"]["resourceAttributes"]
                wanted = {key: word for key, word in asked.items() if word}
                self.asked.append(wanted)
                right = wanted["verb"], wanted["resource"]
                return web.json_response({"status": {"allowed": right not in self.denied}})
            case "GET", "/api/v1/pods":
                return web.json_response({"metadata": {"resourceVersion": "7"}, "items": self.pods})
            case "GET", path if self.node is not None and path.startswith("/api/v1/nodes/"):
                name = path.rpartition("/")[2]
                metadata = {"name": name, "uid": "u", "resourceVersion": "7", "labels": self.node}
                metadata |= {"annotations": self.annotations}
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


READY = AgentAnswer("/run/api.sock", (Check("state", ok=True),))
"""The answer of an agent that is ready."""
THEIR_POD = {
    "metadata": {
        "namespace": "hami",
        "name": "x",
        "labels": {"app.kubernetes.io/component": "hami-device-plugin"},
    }
}
A_POD = {"metadata": {"namespace": "team-a", "name": "one"}}
WRITES = {("patch", "nodes"), ("patch", "pods"), ("create", "events")}
READER = {"reader": True}
NODE_SEEN = {"P-NODE": ["ok"], "P-LABEL": ["ok"]}
ALL_WELL = NODE_SEEN | {
    point: ["ok"] for point in ("P-DRIVER", "P-WITNESS", "P-PLUGIN", "P-RIGHTS")
}
THEIRS = {"P-MONITOR": ["note"]}


@pytest.mark.parametrize(
    ("server", "given", "faults", "lines", "said"),
    [
        ({}, {}, set(), ALL_WELL, ()),
        ({"denied": {("patch", "nodes")}}, {}, {"P-RIGHTS"}, NODE_SEEN, ("patch nodes",)),
        ({"denied": {("get", "nodes")}}, {}, {"P-RIGHTS"}, {"P-NODE": []}, ("get nodes",)),
        ({"denied": {("list", "pods")}}, READER, {"P-RIGHTS"}, {}, ("list pods",)),
        (
            {"denied": WRITES},
            READER,
            set(),
            NODE_SEEN | {"P-RIGHTS": ["note"]},
            ("patch nodes", "create events"),
        ),
        ({"denied": {("get", "pods")}, "pods": [A_POD]}, {}, {"P-RIGHTS"}, {}, ("get pods",)),
        ({"node": None}, {}, {"P-NODE"}, {}, ()),
        ({"pods": [THEIR_POD, A_POD]}, {}, {"P-PLUGIN"}, THEIRS | {"P-PLUGIN": ["wrong"]}, ()),
        ({"pods": [THEIR_POD]}, {"takeover": True}, set(), THEIRS | {"P-PLUGIN": ["note"]}, ()),
    ],
)
async def test_what_the_api_server_says_is_told(
    tmp_path: Path, server: dict, given: dict, faults: set, lines: dict, said: tuple
):
    model = PreflightServer()
    vars(model).update(server)
    flags = {"--takeover": "true"} if "takeover" in given else {}
    async with beside_server(model, tmp_path, **flags) as (_, chosen):
        found = await examine(chosen, reader="reader" in given)
    rights = " ".join(one.said for one in found if one.check == "P-RIGHTS")

    assert faults == wrong(found)
    assert lines == {point: of(found, point) for point in lines}
    assert [] == [word for word in said if word not in rights]
    if given == READER:
        assert {"get", "list", "watch"} == {one["verb"] for one in model.asked}
    if "pods" in server:
        asked = [one for one in model.asked if ("get", "pods") == (one["verb"], one["resource"])]
        name = server["pods"][0]["metadata"]
        wanted = {"namespace": name["namespace"], "name": name["name"]}
        assert [{"verb": "get", "resource": "pods", **wanted}] == asked


async def test_beside_an_agent_rights_that_it_does_not_need_are_noted(tmp_path: Path):
    async with beside_server(PreflightServer(), tmp_path) as (_, chosen):
        found = await examine(chosen, agent=READY, groups=frozenset({"api"}))

    assert [("P-NODE", "ok"), ("P-RIGHTS", "ok"), ("P-EXCESS", "note")] == [
        (one.check, one.verdict) for one in found
    ]
    assert "list secrets" in found[2].said


async def test_hamis_plugin_is_found_by_its_socket(tmp_path: Path):
    server = PreflightServer()
    async with beside_server(server, tmp_path) as (cluster, chosen):
        with socket.socket(socket.AF_UNIX) as theirs:
            theirs.bind(str(cluster.places.plugins / "nvidia-gpu.sock"))
            theirs.listen()
            there = await examine(chosen)
        left = await examine(chosen)

    assert (["wrong"], ["note"]) == (of(there, "P-PLUGIN"), of(there, "P-MONITOR"))
    assert (["ok"], ["note"], set()) == (of(left, "P-PLUGIN"), of(left, "P-LEFTOVERS"), wrong(left))


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
    (note,) = (one for one in fewer if one.check == "P-REPORT")
    assert note.said.endswith(": the agent would write another split_count, and 1 more")


async def test_containers_that_the_agent_answered_and_the_kubelet_has_no_record_of_are_named():
    """It is as after a lost checkpoint. What is not asked for, such as init containers, is not."""
    held = tuple(("demo", f"p{number}", "main") for number in range(5))

    async def listed(_: PodResourcesWitness) -> tuple[Holding, ...]:
        booked = ({RESOURCE: frozenset({"a"})}, {}, {}, {}, {})
        return tuple(
            Holding(space, pod, {name: ids, "other": {}})
            for (space, pod, name), ids in zip(held, booked, strict=True)
        )

    agent = msgspec.structs.replace(READY, held=(*held, ("demo", "p0", "init"), ("demo", "x", "y")))
    async with a_node() as cluster:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(PodResourcesWitness, "list", listed)
            found = await examine(settings(cluster), agent=agent, groups=frozenset({"kubelet"}))
            less = await examine(settings(cluster), agent=READY, groups=frozenset({"kubelet"}))

    (note,) = (one for one in found if one.check == "P-WITNESS")
    assert ("note", True) == (note.verdict, "1 container holds slices" in note.said)
    assert "no record of 4 containers" in note.said
    assert note.said.endswith(": demo/p1, demo/p2, demo/p3 and 1 more")
    assert ["ok"] == of(less, "P-WITNESS")


async def test_an_api_server_that_cannot_be_asked_hides_nothing_else(tmp_path: Path):
    async with a_node() as cluster:
        nowhere = str(tmp_path / "kubeconfig")
        found = await examine(settings(cluster, **{"--kubeconfig": nowhere}))

    assert {"P-NODE"} == wrong(found)
    assert ["ok"] == of(found, "P-KUBELET") == of(found, "P-LIBRARY")
    (told,) = [one for one in found if one.check == "P-NODE"]
    assert told.advice.startswith("give the path of a readable kubeconfig")
    assert "readable kubeconfig" not in told.said, "the remedy is said once"


async def test_in_plain_mode_no_api_server_is_asked_and_only_the_host_is_judged():
    """The directory above HAMi-core's may be read-only, but not open to all."""
    found = {}
    async with a_node() as cluster:
        for mode in (0o555, 0o777, 0o755):
            cluster.places.hook.chmod(mode)
            found[mode] = await examine(settings(cluster, **{"--scheduler": "none"}))

    assert [set(), {"P-PATHS"}, set()] == [wrong(each) for each in found.values()]
    assert [] == of(found[0o755], "P-NODE") + of(found[0o755], "P-RIGHTS")


@pytest.fixture
def bare(tmp_path: Path, stub_path: Path) -> Settings:
    """A host in plain mode with the GPUs of the C stub of NVIDIA's library, and nothing else."""
    (tmp_path / "dev").mkdir()
    flags = {
        "--scheduler": "none",
        "--nvml-library": str(stub_path),
        "--kubelet-socket": str(tmp_path / "plugins/kubelet.sock"),
        "--pod-resources-socket": str(tmp_path / "resources.sock"),
        "--hook-path": str(tmp_path / "hook"),
        "--state-dir": str(tmp_path / "state"),
        "--run-dir": str(tmp_path / "run"),
    }
    return make_plan(Sources(flags=flags, host="host")).settings()


async def test_an_empty_host_lacks_everything(bare: Settings, stub_path: Path):
    await asyncio.to_thread(stub_path.unlink)
    found = await examine(bare)

    assert {"P-PATHS", "P-DRIVER", "P-KUBELET"} == wrong(found) - {"P-LIBRARY"}
    (witness,) = [one for one in found if one.check == "P-WITNESS"]
    assert ("note", True) == (witness.verdict, witness.said.endswith("(follows from P-KUBELET)"))
    (told,) = [one for one in found if one.check == "P-DRIVER"]
    assert told.advice.startswith("correct --nvml-library")
    assert "mend" not in told.said, "the remedy is said once"


async def beside(settings: Settings, path: Path, *groups: str) -> list[tuple[str, str]]:
    """What is found beside an agent that is ready."""
    (path / "hook").mkdir(mode=0o755, exist_ok=True)
    found = await examine(
        settings, groups=frozenset(groups) or ALL_GROUPS, agent=READY, device_files=path / "dev"
    )
    return [(one.check, one.verdict) for one in found]


async def test_the_device_files_are_held_against_the_gpus_of_the_driver(bare, stub, tmp_path: Path):
    stub.order([0, 1, 3])
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"):
        (tmp_path / "dev" / name).touch()
    fewer = await beside(bare, tmp_path, "driver")
    (tmp_path / "dev/nvidia2").touch()
    all_three = await beside(bare, tmp_path, "driver")
    (tmp_path / "dev/nvidia-uvm").unlink()
    without = await beside(bare, tmp_path, "driver")

    assert [("P-DRIVER", "ok"), ("P-ACCESS", "note")] == fewer
    assert [("P-DRIVER", "ok"), ("P-ACCESS", "ok")] == all_three
    assert [("P-DRIVER", "ok"), ("P-ACCESS", "wrong")] == without


@pytest.mark.parametrize(
    ("number", "verdict", "said"),
    [
        (errno.EPERM, "wrong", "may not be opened: the device cgroup forbids it"),
        (errno.EACCES, "unknown", "may not be opened by this user"),
        (errno.ENODEV, "wrong", "cannot be opened (No such device)"),
    ],
)
async def test_a_device_file_that_cannot_be_opened_is_told_with_the_reason(
    bare, stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number, verdict, said
):
    """Those of GPUs are not opened: that would wake them."""
    plain = os.open

    def opened(path, *more, **named):
        if Path(path).parent == tmp_path / "dev":
            raise OSError(number, os.strerror(number))
        return plain(path, *more, **named)

    stub.order([0])
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr(os, "open", opened)
    found = await examine(
        bare, groups=frozenset({"driver"}), agent=READY, device_files=tmp_path / "dev"
    )

    assert [(verdict, f"{tmp_path}/dev/{name}", said) for name in ("nvidiactl", "nvidia-uvm")] == [
        (one.verdict, one.subject, one.said) for one in found if one.check == "P-ACCESS"
    ]


async def test_of_a_driver_that_hangs_it_is_told_how_long_gpus_stay_on_offer(
    bare, stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor, "DRIVER_SECONDS", 0.2)
    stub.order([0])
    stub.hang(slot=0)
    later = "once it has not answered for 60 s (health.driverHang)"
    told = {}
    for name, agent in (
        ("runs", READY),
        ("ended", AgentAnswer("/x", failure="gone")),
        ("no", None),
    ):
        found = await examine(bare, groups=frozenset({"driver"}), agent=agent)
        told[name] = {later in one.means for one in found if one.check == "P-DRIVER"}

    assert {"runs": {True}, "ended": {False}, "no": {False}} == told


@pytest.mark.parametrize(
    ("names", "alive"),
    [
        (("hami-gpu-0123abcd.sock",), 1),
        (("hami-gpu-0123abcd.sock", "nvidia-gpu.sock", "hami-x.sock"), 1),
        (("hami-gpu-0123abcd.sock", "hami-gpu-89abcdef.sock"), 2),
    ],
)
async def test_live_sockets_of_agents_are_counted(bare, tmp_path: Path, names, alive: int):
    (tmp_path / "plugins").mkdir()
    with contextlib.ExitStack() as opened:
        for name in names:
            theirs = opened.enter_context(socket.socket(socket.AF_UNIX))
            theirs.bind(str(tmp_path / "plugins" / name))
            theirs.listen()
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / "plugins/hami-gpu-aaaaaaaa.sock"))
        found = await examine(bare, groups=frozenset({"agent"}), agent=READY)

    (one,) = [each for each in found if each.check == "P-SECOND"]
    said = "2 agents serve the kubelet" if alive == 2 else "names no holder; 1 live socket of"
    assert ("wrong" if alive == 2 else "ok", True) == (one.verdict, said in one.said)


def test_a_lost_gpu_that_the_node_still_names_is_no_reason_to_restart_the_agent():
    gpus = described("h100:2").gpus
    text = encode_register(
        RegisteredGpu(
            *(gpu.uuid, gpu.index, 10, 81559, 100, gpu.name, gpu.numa or 0, "hami-core"),
            healthy=gpu.index == 0,
        )
        for gpu in gpus
    )
    chosen = make_plan(Sources(host="host")).settings()
    silent = Scan("570", gpus[:1])
    lost = msgspec.structs.replace(silent, faults=(GpuFault(gpus[1].uuid, "GPU is lost"),))

    assert () == report_differences(chosen, lost, {REGISTER: text})
    assert report_differences(chosen, silent, {REGISTER: text})
    assert () == report_differences(chosen, Scan("570", ()), {REGISTER: "[1]"}), "nothing to say"


@pytest.mark.parametrize(
    ("more", "environ", "verdict"),
    [
        ({}, {}, "wrong"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "unknown"),
        ({"--kubeconfig": "/none"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "wrong"),
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
    given = make_plan(Sources(flags={**flags, **more}, host="n")).settings()
    seen = NodeSeen(given, environ, frozenset({"driver"}))
    findings = await doctor.examine(seen)

    assert [("P-DRIVER", "ok"), ("P-CDI", verdict)] == [
        (one.check, one.verdict) for one in findings
    ]
