"""One simulated node with its cluster in this process, and the agent as a child process.

A sandbox that stays up restarts the agent.
"""

import asyncio
import contextlib
import json
import random
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from agent.errors import host_port
from agent.kit.cell import Cell, News
from agent.kit.timing import SystemClock
from agent.model import Gpu
from agent.sandbox.apiserver import ApiServerModel
from agent.sandbox.apiserver_requests import ADMIN, NODE_PREFIX
from agent.sandbox.hardware import SimulatedHardware, serve_hardware
from agent.sandbox.kubelet.model import KubeletModel
from agent.sandbox.kubelet.podloop import KubeletPodLoop, container_id
from agent.sandbox.kubelet.pods import KubeletEvent
from agent.sandbox.lab.child import AgentChild, AgentLog, child_environment, start_child
from agent.sandbox.scheduler.loop import SchedulerModel
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.webhook import admit_pod
from agent.sandbox.store import Json, NotFoundError, ObjectStore

# The paths of one sandbox, in one directory that is short enough for unix socket names.

MOST_CHARACTERS: Final = 60
"""A unix socket's path has at most 107 bytes, and the longest one here adds 47."""

STAND_IN: Final = b"stand-in for HAMi-core's library; the sandbox starts no container\n"


class Places:
    """The directory of a sandbox and the paths in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plugins = root / "device-plugins"
        self.pod_resources = root / "pod-resources"
        self.hardware_socket = root / "gpus.sock"
        self.kubeconfig = root / "kubeconfig"
        self.log = root / "agent.log"
        self.config = root / "config.yaml"
        """The agent's settings file; absent unless a person or test writes it."""
        self.hook = root / "hook"
        """HAMi's HOOK_PATH: above vgpu/."""
        self.state = root / "state"
        self.run = root / "run"
        self.cgroup = root / "cgroup"


@contextlib.contextmanager
def open_places(*, keep: bool = False) -> Iterator[Places]:
    """Create the directory with the files that a node has without an agent; remove or `keep` it.

    Raises OSError: it cannot be created.
    """
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > MOST_CHARACTERS - len("/hami-12345678"):
        parent = Path("/tmp")  # noqa: S108 -- mkdtemp below makes a private directory in it
    root = Path(tempfile.mkdtemp(prefix="hami-", dir=parent))
    try:
        places = Places(root)
        for directory in (places.hook / "vgpu", places.state, places.run, places.cgroup):
            directory.mkdir(parents=True, mode=0o755)
        place_library(places.hook / "vgpu", places.hook)
        yield places
    finally:
        if not keep:
            shutil.rmtree(root)


def place_library(directory: Path, hook: Path) -> None:
    """Write a stand-in for libvgpu.so and the ld.so.preload that names it in containers.

    `directory`: the one that the agent has as vgpu/ below `hook`, its hook path. Raises OSError.
    """
    (directory / "libvgpu.so").write_bytes(stand_in())
    (directory / "ld.so.preload").write_text(f"{hook}/vgpu/libvgpu.so\n")


def stand_in() -> bytes:
    """What begins as a library for this machine. Raises OSError."""
    return Path("/proc/self/exe").read_bytes()[:64] + STAND_IN


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the caller's exception itself in place of a group that has no other."""
    try:
        yield
    except BaseExceptionGroup as group:
        single, *others = group.exceptions
        if others:
            raise
        raise single from single.__cause__


# The node.

NODE: Final = "sandbox"
RESOURCE: Final = "nvidia.com/gpu"
NAMESPACE: Final = "demo"
_HISTORY: Final = 20_000
RESTART_DELAY: Final = 1.0
"""Seconds. More than in the systemd unit, so that people can follow."""


def follow_cgroups(home: Path, kubelet: KubeletModel) -> None:
    """Keep a directory for each pod below `home`, with one for each running container."""
    there: set[str] = set()
    home.mkdir()

    def sync(_: KubeletEvent) -> None:
        wanted: set[str] = set()
        # The kubelet keeps a pod's cgroup while its containers restart.
        for pod in (one for one in kubelet.node.pods.values() if one.has_cgroup):
            name = f"pod{pod.spec.uid}"
            wanted |= {name, *(f"{name}/{container_id(pod, one)}" for one in pod.running)}
        for name in sorted(wanted - there):
            (home / name).mkdir()
        for name in sorted(there - wanted, reverse=True):
            (home / name).rmdir()
        there.clear()
        there.update(wanted)

    kubelet.history.listen(sync)


@dataclass(frozen=True, slots=True)
class LabOptions:
    """The options of a sandbox.

    `arguments` go to the agent after all others. `web_port` 0: a free port. By default the
    scheduler's client is as slow as HAMi's.
    """

    gpus: Sequence[Gpu]
    environ: Mapping[str, str]
    arguments: Sequence[str] = ()
    web_port: int = 0
    keep: bool = False
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)


@dataclass(eq=False, slots=True)
class SandboxCluster:
    """All models of one node, and the agent that serves it. Made by `open_cluster`.

    `pulse` counts what the kubelet and the agent have done.
    """

    options: LabOptions
    places: Places
    pulse: Cell[int]
    tasks: asyncio.TaskGroup
    hardware: SimulatedHardware
    store: ObjectStore
    api: ApiServerModel
    kubelet: KubeletModel
    log: AgentLog
    admin_token: str
    children: list[AgentChild] = field(default_factory=list)

    @property
    def user(self) -> str:
        """The agent's user name at the API server."""
        return NODE_PREFIX + NODE

    @property
    def agent(self) -> AgentChild:
        """The agent that was started last. Raises IndexError: no agent was started."""
        return self.children[-1]

    @property
    def web_address(self) -> str | None:
        """The address of the present agent's web server, once the agent has logged it."""
        for fields in (line.fields for line in self.log.of("web.listening", self.agent.pid)):
            if "port" in fields:
                return f"http://{host_port(str(fields['host']), fields['port'])}"
        return None

    def command(self) -> tuple[str, ...]:
        """The arguments of the agent."""
        places = self.places
        config = ("--config", str(places.config)) if places.config.exists() else ()
        return (
            "run",
            *config,
            *("--node-name", NODE),
            *("--simulate", f"unix:{places.hardware_socket}"),
            *("--kubelet-socket", str(places.plugins / "kubelet.sock")),
            *("--pod-resources-socket", str(places.pod_resources / "kubelet.sock")),
            *("--kubeconfig", str(places.kubeconfig)),
            *("--hook-path", str(places.hook)),
            *("--state-dir", str(places.state)),
            *("--run-dir", str(places.run)),
            *("--web-port", str(self.options.web_port)),
            *("--log-format", "json"),
            *self.options.arguments,
        )

    def environment(self) -> dict[str, str]:
        """The environment of the agent."""
        settings = {"HAMI_AGENT_PATHS_CGROUP": str(self.places.cgroup)}
        return child_environment(self.options.environ) | settings

    async def start_agent(self) -> AgentChild:
        """Start an agent and read its log. Raises OSError: it cannot be started."""
        child = await start_child(self.command(), self.environment(), self.log)
        self.children.append(child)
        self.tasks.create_task(child.read())
        return child

    def submit(self, pod: Json) -> Json:
        """Create a pod as a user does: it goes through the webhook. Raises StatusError."""
        return self.store.create("pods", _admitted(pod, self.store, self.options))

    def pod(self, name: str) -> Json:
        """A pod of the sandbox's namespace. Raises NotFoundError."""
        return self.store.get("pods", NAMESPACE, name)

    def node(self) -> Json:
        """The Node object; empty metadata before the kubelet has created it."""
        try:
            return self.store.get("nodes", "", NODE)
        except NotFoundError:
            return {"metadata": {}, "status": {}}

    def node_annotations(self) -> Mapping[str, str]:
        """The Node's annotations."""
        return self.node()["metadata"].get("annotations") or {}

    def allocatable(self) -> int:
        """The number of slices that the kubelet offers now."""
        return self.kubelet.allocatable(RESOURCE)

    async def until(self, holds: Callable[[], bool], within: float) -> bool:
        """Wait up to `within` seconds for `holds()`, checked after every change, not by polling."""
        news = News(self.store.writes, self.pulse)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not holds():
                    await news.wait()
        return holds()


@contextlib.asynccontextmanager
async def open_cluster(options: LabOptions) -> AsyncIterator[SandboxCluster]:
    """Start all models, without an agent; at the end, stop and remove them. Raises OSError."""
    chance, clock, pulse = random.SystemRandom(), SystemClock(), Cell(0)

    def beat() -> None:
        pulse.set(pulse.value + 1)

    def hear(_: KubeletEvent) -> None:
        hardware.end_others(kubelet.node.running())
        beat()

    async with contextlib.AsyncExitStack() as stack:
        places = stack.enter_context(open_places(keep=options.keep))
        stack.enter_context(unwrapped())
        store = ObjectStore(clock, chance, _HISTORY)
        store.create("namespaces", {"metadata": {"name": NAMESPACE}})
        hardware = SimulatedHardware(options.gpus)
        await stack.enter_async_context(serve_hardware(hardware, places.hardware_socket))

        tokens = {f"{chance.getrandbits(128):032x}": user for user in (NODE_PREFIX + NODE, ADMIN)}
        agents, admin = tokens
        api = ApiServerModel(store, tokens, lambda pod: _admitted(pod, store, options))
        await api.start()
        stack.push_async_callback(api.stop)
        places.kubeconfig.write_text(kubeconfig(api.url, agents))
        places.kubeconfig.chmod(0o600)

        kubelet = KubeletModel(places.plugins, places.pod_resources, clock, chance)
        follow_cgroups(places.cgroup / "kubepods", kubelet)
        kubelet.history.listen(hear)
        await kubelet.start()
        stack.push_async_callback(kubelet.kill)

        log = stack.enter_context(contextlib.closing(AgentLog(places.log, beat)))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        # Nobody who watches a sandbox wants to wait until HAMi's scheduler reads the Node.
        settings = replace(options.scheduler, eager=True)
        scheduler = SchedulerModel(store, clock, chance, settings=settings)
        loop = KubeletPodLoop(kubelet, store, NODE, eager=True)
        standing = [tasks.create_task(one.run()) for one in (loop, scheduler)]
        cluster = SandboxCluster(
            options=options,
            places=places,
            pulse=pulse,
            tasks=tasks,
            hardware=hardware,
            store=store,
            api=api,
            kubelet=kubelet,
            log=log,
            admin_token=admin,
        )
        try:
            if not await cluster.until(lambda: "uid" in cluster.node()["metadata"], 5.0):
                raise TimeoutError("the kubelet model did not register its Node within 5 s")
            yield cluster
        finally:
            for child in cluster.children:
                await child.stop()
            for task in standing:
                task.cancel()


def _admitted(pod: Json, store: ObjectStore, options: LabOptions) -> Json:
    """The new pod after the webhook. Pods may be in a namespace that was never created."""
    named = {"metadata.name": pod["metadata"].get("namespace", NAMESPACE)}
    labels = [one["metadata"].get("labels") for one in store.select("namespaces", fields=named)]
    return admit_pod(pod, options.scheduler, *labels)


def kubeconfig(server: str, token: str) -> str:
    """A kubeconfig for one user at one server, as JSON, which is also YAML."""
    named = {
        "clusters": [{"name": "sandbox", "cluster": {"server": server}}],
        "users": [{"name": NODE, "user": {"token": token}}],
        "contexts": [{"name": "sandbox", "context": {"cluster": "sandbox", "user": NODE}}],
    }
    return json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "sandbox", **named})


def free_port() -> int:
    """A free port of loopback, to be used by all agents of one sandbox."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        port: int = opened.getsockname()[1]
        return port


async def keep_agent(cluster: SandboxCluster, tell: Callable[[str], None]) -> None:
    """Start the agent again whenever it has ended, for ever."""
    while True:
        agent = cluster.agent
        code = await agent.wait()
        tell(f"the agent, pid {agent.pid}, ended with {code}")
        await asyncio.sleep(RESTART_DELAY)
        tell(f"agent started, pid {(await cluster.start_agent()).pid}")


# A client of the agent's web server.

DEADLINE: Final = 5.0


class WebAnswer(NamedTuple):
    """An answer: its HTTP status and its text."""

    status: int
    text: str


async def fetch(address: str, path: str) -> WebAnswer:
    """The page at `path`. Raises OSError, TimeoutError: no answer."""
    try:
        async with (
            asyncio.timeout(DEADLINE),
            aiohttp.ClientSession() as session,
            session.get(address + path) as answer,
        ):
            return WebAnswer(answer.status, await answer.text())
    except aiohttp.ClientError as error:
        raise ConnectionError(f"{address}{path}: {error}") from error


async def scrape(address: str) -> list[tuple[str, dict[str, str], float]]:
    """Every sample of the metrics page: name, labels, value. Raises OSError, TimeoutError."""
    families = text_string_to_metric_families((await fetch(address, "/metrics")).text)
    return [(s.name, dict(s.labels), float(s.value)) for f in families for s in f.samples]
