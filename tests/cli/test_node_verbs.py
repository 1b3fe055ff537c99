"""The verbs that act on a node, beside a stand-in for the agent and the API server's model.

A part of tests/golden/node-verbs.txt begins with `=== name`. A line `> …` prepares something, which
a method of NodeStory does. A line `$ …` is a command: behind it stand what it prints, what it asks,
and what it leaves on the Nodes. HERE is a folder; WORDS has the other words in capitals. To add a
case, add its lines and run `make golden`.

tests/app/test_uninstalling.py has what `uninstall` waits for; tests/peers asks the real server.
"""

import asyncio
import contextlib
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiohttp import web

from agent.cluster import CORDON, HANDSHAKE, MUTEX_LOCK, REGISTER, SCORE
from agent.errors import ApiError, ApiForbidden, ApiNotFound
from agent.hami.annotations import RegisteredGpu, encode_json
from agent.hami.region import V1_2
from agent.host.system import LockFile
from agent.kube.objects import KubeApi
from agent.kube.reader import KubeLeftovers, NodeLeftovers
from agent.sandbox.driver import open_simulation
from agent.web.server import serve_socket
from tests.builders import G1, G2, NODE, RESOURCE
from tests.cli.transcripts import ran
from tests.fakes.kubeworld import ModelWorld, model_world
from tests.hami_regions import read_bytes
from tests.host.region_dirs import OTHER, poke, with_region
from tests.recorded import golden_part, parts
from tests.shape import tree

pytestmark = pytest.mark.looptime(False)
FILE = "node-verbs.txt"
TOLD = parts(FILE)
REPORT = encode_json(
    [
        RegisteredGpu(uuid, index, 10, 81559, 100, "NVIDIA H100", 0, "hami-core", healthy=True)
        for index, uuid in enumerate((G1, G2))
    ]
)
NOTES = dict.fromkeys((REGISTER, SCORE, HANDSHAKE, "hami-agent/0", "hami-agent/1"), "1")
WORDS = {
    "FLAGS": f"--kubeconfig HERE/kubeconfig --node-name {NODE} --run-dir HERE/run --state-dir "
    "HERE/state --hook-path HERE/hook --device-config '' --nodeconfig ''",
    "ALL": "--all-nodes --namespace gpus --selector app=agent",
}
FAILURES = {
    "forbidden": ApiForbidden("no right", status=403),
    "bad": ApiError("bad gateway", status=502),
    "gone": ApiNotFound("gone", status=404),
    "silent": ApiError("silent"),
}


class NodeStory:
    """One part of the file, as it is played: what lines `>` prepare."""

    def __init__(self, world: ModelWorld, here: Path, patch: pytest.MonkeyPatch) -> None:
        self.world, self.here, self.patch = world, here, patch
        self.lock = LockFile(here / "run/lock")
        self.stack = contextlib.AsyncExitStack()
        self._asked, self._calls, self._left = list[str](), Counter[tuple[str, str, str]](), ""
        (here / "run").mkdir()
        patch.setattr("agent.cli.node.WAIT", 0.0)

    def node(
        self, name: str, ready: str = "True", slices: str = "", resource: str = RESOURCE
    ) -> None:
        """A Node on which an agent wrote, whose kubelet lives, and serves so many slices."""
        kinds = {"Other": "Unknown", "Ready": ready, "GpuDegraded": "True"}
        notes = NOTES | {MUTEX_LOCK: "a", CORDON: "", "seen": "1"}
        status: dict[str, Any] = {"allocatable": {resource: slices} if slices else {}}
        status["conditions"] = [{"type": kind, "status": value} for kind, value in kinds.items()]
        metadata = {"name": name, "annotations": notes}
        self.world.store.create("nodes", {"metadata": metadata, "status": status})

    def reported(self, cordoned: str = "") -> None:
        """The Node with two GPUs that its agent reported."""
        notes = {CORDON: cordoned} if cordoned else {}
        self.world.create_node({REGISTER: REPORT, "kept": "1", HANDSHAKE: "Requesting", **notes})

    def note(self, key: str, value: str = "") -> None:
        self.world.edit_node({key: value.encode().decode("unicode-escape") or None})

    def pod(self, name: str, node: str = NODE, phase: str = "Running") -> None:
        """A pod with one slice."""
        container = {"name": "main", "resources": {"limits": {RESOURCE: "1"}}}
        labels = {"app": name.partition("-")[0]}
        metadata = {"name": name, "namespace": "gpus", "labels": labels}
        spec = {"nodeName": node.strip("-"), "containers": [container]}
        pod = {"metadata": metadata, "spec": spec, "status": {"phase": phase}}
        self.world.store.create("pods", pod)

    def fails(self, name: str, how: str) -> None:
        """The Node cannot be cleaned."""
        plain = KubeLeftovers.clean

        async def clean(api: KubeLeftovers, node: NodeLeftovers) -> None:
            if node.name == name:
                raise FAILURES[how]
            await plain(api, node)

        self.patch.setattr(KubeLeftovers, "clean", clean)

    def others_write(self, times: str) -> None:
        """So often another cordons a GPU between read and write."""
        plain, others = KubeApi.get_node, [f"GPU-{number}" for number in range(int(times))]

        async def get_node(api: KubeApi):
            seen = await plain(api)
            if others:
                self.world.edit_node({CORDON: others.pop()})
            return seen

        self.patch.setattr(KubeApi, "get_node", get_node)

    def home(self) -> None:
        """The kubeconfig is in the home directory, too."""
        (self.here / ".kube").mkdir()
        shutil.copy(self.world.kubeconfig, self.here / ".kube/config")

    async def agent(self, status: int, text: str) -> None:
        """An agent answers each action alike."""

        async def answer(request: web.BaseRequest) -> web.Response:
            self._asked.append(f"{request.method} {request.path}")
            return web.Response(status=status, text=text)

        await self.stack.enter_async_context(serve_socket({}, self.here / "s", answer))

    async def hardware(self, gpus: str) -> None:
        """Simulated GPUs."""
        await self.stack.enter_async_context(open_simulation(gpus, socket_path=self.here / "s"))

    async def stranger(self, text: str) -> None:
        """Something else takes requests there: it waits, or says a text and closes."""

        async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"}")
            if text == "waits":
                await reader.read()
            writer.write(text.encode().decode("unicode-escape").encode())
            writer.close()

        self.patch.setattr("agent.cli.sandbox.DEADLINE", 0.5)
        server = await asyncio.start_unix_server(babble, self.here / "s")
        self.stack.callback(server.close)

    def agent_runs(self) -> None:
        assert self.lock.try_take()

    def file(self, name: str) -> None:
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    async def play(self, line: str) -> str:
        """The line, and what came of it."""
        mark, _, rest = line.partition(" ")
        if mark == ">":
            word, *values = rest.split()
            match word:
                case "gone":
                    self.world.delete_node()
                case "token":
                    self.world.use_token(*values)
                case "outage":
                    await self.world.begin_outage()
                case "agent":
                    await self.agent(int(values[0]), rest.split(" ", 2)[2])
                case "hardware" | "stranger":
                    await getattr(self, word)(rest.partition(" ")[2])
                case _:
                    getattr(self, word)(*values)
            self._left = self.left()
            return f"{line}\n"
        for word, text in WORDS.items():
            rest = rest.replace(word, text)
        environ = {"KUBECONFIG": f"{self.here}/kubeconfig", "NODE_NAME": NODE}
        said = await asyncio.to_thread(ran, rest.replace("HERE", f"{self.here}"), environ)
        said = said.replace(f"{self.here}", "HERE")
        said = re.sub(r"(127.0.0.1(?::|', )|pid )\d+", r"\1NUMBER", said)
        calls = self.world.model.asked.copy()
        names = {f"{verb} {resource}" for _, verb, resource in calls - self._calls}
        asked = [*self._asked, *sorted(names)]
        before, self._left, self._asked, self._calls = self._left, self.left(), [], calls
        left = self._left if self._left != before else "nothing is changed\n"
        return f"{line}\n{said}asked: {', '.join(asked) or 'nothing'}\n{left}"

    def left(self) -> str:
        """The Nodes, a line each."""
        lines = []
        for node in self.world.store.select("nodes"):
            notes = node["metadata"]["annotations"].items()
            words = [key if value == REPORT else f"{key}={value!r}" for key, value in notes]
            words += [one["type"] for one in node.get("status", {}).get("conditions", ())]
            lines.append(f"{node['metadata']['name']} has {' '.join(words)}\n")
        return "".join(lines)


async def played(name: str, here: Path) -> str:
    """The part, as it is now."""
    identity = f"system:node:{NODE}" if name.startswith("this Node") else "admin"
    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs():
        async with model_world(here, identity) as world:
            story = NodeStory(world, here, patch)
            lines = [line for line in TOLD[name].splitlines() if re.match("[>$] ", line)]
            async with story.stack:
                return "".join([await story.play(line) for line in lines])


@pytest.mark.parametrize("name", TOLD)
async def test_a_verb_does_what_it_did(name, tmp_path):
    text = await played(name, tmp_path)

    assert golden_part(FILE, name, text) == text


def test_who_uninstalls_asks_for_what_it_is_granted_and_every_right_is_used():
    told = "".join(text for name, text in TOLD.items() if name.startswith("all Nodes"))
    asked = {one for line in re.findall("(?m)^asked: (.*)$", told) for one in line.split(", ")}
    rules = re.findall(
        r"(?m)^ +resources: \[(.*)\]\n +verbs: \[(.*)\]$",
        tree.text("deploy/chart/hami-agent/templates/uninstall.yaml"),
    )

    # The journal counts nodes/status with the nodes.
    granted = {(verb, kind) for kind, verbs in rules for verb in verbs.split(", ")}
    assert asked == {f"{verb} {kind.partition('/')[0]}" for verb, kind in granted}
    assert {("patch", "nodes"), ("patch", "nodes/status")} <= granted


@pytest.mark.parametrize("mode", ["hami", "none", "an outage"])
async def test_containers_that_a_killed_agent_held_back_are_released(mode, tmp_path, monkeypatch):
    async with model_world(tmp_path) as world:
        story = NodeStory(world, tmp_path, monkeypatch)
        story.node(NODE)
        held, free = with_region(tmp_path / "hook"), with_region(tmp_path / "hook", OTHER)
        poke(held, V1_2.tail + 8, "<i", -1)  # recent_kernel
        before, notes = free.read_bytes(), world.node_annotations()
        if mode == "an outage":
            await world.begin_outage()

        said = await story.play(
            f"$ hami-agent uninstall FLAGS{' --scheduler none' * (mode == 'none')}"
        )

        assert ("exit 3" if mode == "an outage" else "exit 0") == said.splitlines()[1]
        assert 0 == read_bytes(held.read_bytes()).region.recent_kernel
        assert before == free.read_bytes()
        assert (mode == "hami") == (world.node_annotations() != notes)


async def test_no_agent_starts_while_the_node_is_cleaned(tmp_path, monkeypatch):
    plain, taken = KubeLeftovers.clean, list[bool]()
    async with model_world(tmp_path) as world:
        story = NodeStory(world, tmp_path, monkeypatch)
        story.node(NODE)

        async def clean(api: KubeLeftovers, node: NodeLeftovers) -> None:
            taken.append(LockFile(tmp_path / "run/lock").try_take())
            await plain(api, node)

        monkeypatch.setattr(KubeLeftovers, "clean", clean)
        await story.play("$ hami-agent uninstall FLAGS")

    assert [False] == taken
    assert story.lock.try_take()
    story.lock.release()
