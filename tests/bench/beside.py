"""The agent as operators meet it: beside real peers, over TLS, with the driver's library.

One node of tests/peers: API server, etcd, kubelet, containerd. The agent has what its pod would
have: an installation, the files of its ServiceAccount, the settings of the chart. The GPUs are
those of the C stub, which the real pynvml loads.
"""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import yaml

from agent.kube.client import SERVICE_ACCOUNT
from tests.bench.lab import ROOT, install
from tests.fakes import nvml_stub
from tests.peers.lab.agents import RESOURCE, Agent
from tests.peers.lab.cluster import Cluster, open_cluster
from tests.peers.lab.control import NODE
from tests.peers.lab.part import Part, until, until_answer
from tests.peers.lab.placing import Programs
from tests.peers.lab.pods import REGISTERED, klog_stamp, wall
from tests.peers.lab.running import account_token

GPUS = 8
SLICES = 80
PATIENCE = 60.0
STEP = 0.01
SETTINGS = ROOT / "deploy/manifests/config.yaml"
KUBELETS_DEFAULTS = {"nodeStatusUpdateFrequency": "10s", "nodeStatusReportFrequency": "5m"}
_GATE = 'read -r _ <"$1"; shift; exec "$@"'


def lacks() -> str:
    """What this machine lacks for it, in a sentence; empty if nothing."""
    if os.geteuid() != 0:
        return "the real peers need root"
    if not shutil.which("cc"):
        return "the stub of the driver needs a C compiler (cc)"
    if not built():
        return "the real peers are not built: run make peers"
    return _said("tests/peers/install", "--lacks")


def built() -> str:
    """The folder of the peers' programs; empty if they are not built."""
    return _said("tests/peers/build", "--built")


def _said(*command: str) -> str:
    pipe = subprocess.PIPE
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=pipe, text=True)  # noqa: S603 -- our own scripts
    return done.stdout.strip()


class RealBed:
    """One cluster, in which agents start one after the other."""

    def __init__(self, cluster: Cluster, program: Path, library: Path, settings: Path) -> None:
        self.cluster = cluster
        self.command = (
            *(str(program), "run", "--node-name", NODE, "--config", str(settings)),
            *("--nvml-library", str(library), "--web-port", "0", "--log-format", "json"),
        )
        server = urlsplit(cluster.plane.server)
        self._environment = {
            "PATH": "/usr/bin:/bin",
            "KUBERNETES_SERVICE_HOST": str(server.hostname),
            "KUBERNETES_SERVICE_PORT": str(server.port),
        }
        self._started = 0

    async def start(self) -> tuple[Agent, float]:
        """Start an agent; returns it, and the seconds from exec until the kubelet has its Register.

        The process waits at a gate, so that it begins at a known moment.

        Raises OSError, TimeoutError: it cannot be started, or does not register.
        """
        cluster = self.cluster
        gate = cluster.root / "gate"
        if not gate.exists():
            os.mkfifo(gate)
        self._started += 1
        command = ("sh", "-c", _GATE, "gate", str(gate), *self.command)
        agent = self._agent(f"bench-{self._started}", command)
        handle = os.open(gate, os.O_RDWR)
        try:
            await agent.part.start()
            cluster.agents.append(agent)
            pid = agent.part.pid
            await until(lambda: _waits_at(pid, gate), PATIENCE, agent.part.tail)
            with cluster.kubelet.part.log.open() as log:
                log.seek(0, os.SEEK_END)
                begun = wall()
                os.write(handle, b"\n")
                moment = await _until_register(log)
        finally:
            os.close(handle)
        return agent, moment - begun

    async def until_up(self, agent: Agent) -> None:
        """Return once kubelet and Node have the slices and the agent is ready.

        Raises TimeoutError: they have not, or it is not.
        """

        async def is_counted() -> bool:
            return len(await self.cluster.kubelet.allocatable(RESOURCE)) == SLICES

        await until_answer(is_counted, PATIENCE, agent.part.tail)
        await self.cluster.nodes.until(self.cluster.is_sharing, PATIENCE, "no slices")
        await until_answer(agent.is_ready, PATIENCE, agent.part.tail)

    async def calm(self) -> None:
        """Have the kubelet write its Node as seldom as kubelets do, and not each second.

        Raises TimeoutError, OSError: it does not come back.
        """
        kubelet = self.cluster.kubelet
        kubelet.configure(self.cluster.runtime.socket, **KUBELETS_DEFAULTS)
        await kubelet.restart()

    async def end(self, agent: Agent) -> None:
        """Kill it, and forget what it kept on the node."""
        await agent.part.kill()
        self.cluster.agents.remove(agent)
        self.cluster.forget_agent_state()

    def _agent(self, name: str, command: tuple[str, ...]) -> Agent:
        space = self.cluster.space
        logs = self.cluster.root / "logs"
        part = Part(name, command, logs, space=space, environment=self._environment)
        return Agent(part, space.view / "run" / "hami-agent")


@contextlib.asynccontextmanager
async def open_bed() -> AsyncIterator[RealBed]:
    """A cluster with eight GPUs of the stub, and no agent yet.

    Raises TimeoutError, OSError: a part does not start.
    """
    program = install()
    async with open_cluster(Programs(Path(built()))) as cluster:
        library = nvml_stub.build(cluster.root)
        stub = nvml_stub.NvmlStub(library)
        stub.order(range(GPUS))
        stub.set(2, memory=16 << 30)
        settings = cluster.root / "config.yaml"
        settings.write_text(yaml.safe_load(SETTINGS.read_text())["data"]["config.yaml"])
        _lay_out_account(cluster, await account_token(cluster.api))
        try:
            yield RealBed(cluster, program, library, settings)
        except BaseException:
            sys.stderr.write(cluster.last_words() + "\n")
            raise


def _lay_out_account(cluster: Cluster, token: str) -> None:
    """What the kubelet mounts into a pod with a ServiceAccount."""
    directory = cluster.space.view / SERVICE_ACCOUNT.relative_to("/var")
    directory.mkdir(parents=True)
    (directory / "token").write_text(token)
    (directory / "namespace").write_text("kube-system")
    shutil.copy(cluster.plane.certificates.ca, directory / "ca.crt")


def _waits_at(pid: int, gate: Path) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/fd/0").readlink() == gate
    return False


async def _until_register(log: IO[str]) -> float:
    """When the kubelet logged a Register."""
    said = ""
    async with asyncio.timeout(PATIENCE):
        while REGISTERED not in said:
            await asyncio.sleep(STEP)
            said += log.read()
    moment = klog_stamp(next(line for line in said.splitlines() if REGISTERED in line))
    assert moment is not None
    return moment


def kubelet_port(cluster: Cluster) -> int:
    """Where the kubelet serves its API."""
    settings = json.loads((cluster.root / "kubelet.json").read_text())
    port: int = settings["port"]
    return port
