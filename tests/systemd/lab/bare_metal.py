"""A node on bare metal: a machine with systemd, and the models of its kubelet and API server."""

import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from agent.sandbox.lab.cluster import NODE, SandboxCluster, open_cluster, place_library
from tests.peers.lab.control import free_ports
from tests.peers.lab.part import until, until_answer
from tests.process.agent_process import options
from tests.systemd.lab.machine import Machine, Said, booted

T = TypeVar("T")

ROOT: Final = Path(__file__).resolve().parents[3]
UNIT: Final = "hami-agent.service"
PATIENCE: Final = 30.0
"""Seconds for anything that takes one or two on an idle machine."""
READY: Final = "registered, the kubelet takes the lists"
"""The status line of an agent that serves. It may come after the kubelet has the slices."""
KUBELET: Final = "/var/lib/kubelet"
SHOWN: Final = (
    *("ActiveState", "SubState", "Result", "NRestarts", "MainPID", "StatusText"),
    *("ExecMainStatus", "ExecMainCode", "UnitFileState", "FragmentPath"),
    *("ExecMainStartTimestampMonotonic", "ActiveEnterTimestampMonotonic"),
)


@dataclass(frozen=True, slots=True)
class BareMetal:
    """The machine, its peers, and what an operator does on it."""

    machine: Machine
    cluster: SandboxCluster
    port: int

    async def install(self, *arguments: str) -> Said:
        """`systemd/install ARGUMENTS`, with the dependencies from a folder."""
        locked = ("--lock", "/src/wheels/lock.txt", "--wheels", "/src/wheels")
        more = () if "--rollback" in arguments else locked
        return await self.machine.try_run("/src/systemd/install", *more, *arguments, within=240)

    def keep(self, version: str = "") -> None:
        """What installs have made of that version, or of all, is there until the next one.

        The files are linked: an environment is most of an install's time, and nothing writes to it.
        """
        made, kept = self.machine.path("/opt/hami-agent/versions"), self.machine.path("/opt/kept")
        for source, target, those in (made, kept, ""), (kept, made, version):
            for one in source.glob(f"{those}*/.complete"):
                if not (copy := target / one.parent.name).exists():
                    shutil.copytree(one.parent, copy, symlinks=True, copy_function=os.link)

    async def systemctl(self, *arguments: str) -> str:
        """`systemctl ARGUMENTS hami-agent`, which has to end well."""
        return await self.machine.run("systemctl", *arguments, UNIT)

    async def shown(self) -> Mapping[str, str]:
        """What systemd says of the service."""
        said = await self.systemctl("show", *(f"--property={name}" for name in SHOWN))
        return dict(line.split("=", 1) for line in said.splitlines())

    async def until_shown(self, within: float = PATIENCE, **wanted: str) -> Mapping[str, str]:
        """What systemd says of the service, once it says all of that."""

        async def ask() -> Mapping[str, str] | None:
            shown = await self.shown()
            return shown if wanted.items() <= shown.items() else None

        return await self._until(ask, f"systemd does not say {wanted}", within)

    async def _until(self, ask: Callable[[], Awaitable[T | None]], why: str, within: float) -> T:
        """The first answer that there is."""
        found = await ask()

        async def is_found() -> bool:
            nonlocal found
            found = found or await ask()
            return bool(found)

        await until_answer(is_found, within, lambda: why)
        assert found
        return found

    async def offers(self, slices: int, within: float = PATIENCE) -> None:
        """The kubelet has so many slices to give."""
        assert await self.cluster.until(lambda: self.cluster.allocatable() == slices, within), (
            self.cluster.allocatable(),
            await self.last_words(),
        )

    def registrations(self) -> int:
        """How often an agent has registered with the kubelet."""
        return len(self.cluster.kubelet.history.of("registered"))

    async def serves_again(self, known: int, within: float = PATIENCE) -> None:
        """The kubelet has all slices by a registration after so many.

        The moment without slices is too short to be waited for: a busy machine may not see it.
        """
        cluster, history = self.cluster, self.cluster.kubelet.history

        def is_served() -> bool:
            registered = history.of("registered")
            if len(registered) <= known or cluster.allocatable() != 80:
                return False
            return history.of("listed")[-1].elapsed >= registered[-1].elapsed

        assert await cluster.until(is_served, within), await self.last_words()

    async def journal(self, event: str = "") -> list[dict[str, Any]]:
        """The journal's entries of the agent; `event`: the fields of those of that name."""
        said = await self.machine.run(
            "journalctl", "--identifier", "hami-agent", "--output", "json", "--no-pager"
        )
        entries = [json.loads(line) for line in said.splitlines()]
        if not event:
            return entries
        found = (json.loads(e["MESSAGE"]) for e in entries if e["MESSAGE"].startswith("{"))
        return [fields for fields in found if fields["event"] == event]

    async def until_said(self, event: str) -> dict[str, Any]:
        """The first such line of the agent, once it is there."""
        why = f"the journal has no {event}"
        return (await self._until(lambda: self.journal(event), why, PATIENCE))[0]

    async def until_words(self, *words: str) -> None:
        """All of that stands in the journal: it is written a little after it happened."""

        async def ask() -> bool:
            said = await self.last_words()
            return all(word in said for word in words)

        await self._until(ask, f"the journal does not say {words}", PATIENCE)

    async def until_restarted(self, times: int, within: float = PATIENCE) -> None:
        """It was started again so often at least: one that gets no time may be killed once more."""

        async def ask() -> bool:
            return int((await self.shown())["NRestarts"]) >= times

        await self._until(ask, f"it was not started again {times} times", within)

    async def until_there(self, inside: str) -> Path:
        """A file of the machine, once it is there."""
        path = self.machine.path(inside)
        await until(path.exists, PATIENCE, lambda: f"there is no {inside}")
        return path

    async def last_words(self) -> str:
        """What journal and systemd have to say, for a failure."""
        said = await self.machine.try_run("journalctl", "--lines", "400", "--no-pager")
        return said.out

    def endpoints(self) -> set[str]:
        """The sockets of plugins in the kubelet's directory."""
        found = self.cluster.places.plugins.glob("*.sock")
        return {path.name for path in found} - {"kubelet.sock"}

    def write(self, inside: str, text: str, mode: int = 0o644) -> Path:
        """A file of the machine."""
        path = self.machine.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def packages(self) -> Path:
        """Where the packages of the version in use lie."""
        (found,) = self.machine.path("/opt/hami-agent/current/lib").glob("python3*/site-packages")
        return found

    def settings(self, **more: str) -> None:
        """The service's variables: those of this node, and more."""
        variables = {
            "NODE_NAME": NODE,
            "KUBECONFIG": f"{KUBELET}/kubeconfig",
            "HAMI_AGENT_DRIVER_SIMULATE": f"unix:{KUBELET}/gpus.sock",
            "HAMI_AGENT_PATHS_CGROUP": f"{KUBELET}/cgroup",
            "HAMI_AGENT_WEB_PORT": str(self.port),
        } | more
        text = "".join(f"{name}={value}\n" for name, value in variables.items())
        self.write("/etc/hami-agent/env", text, 0o640)

    async def drop_in(self, *lines: str) -> None:
        """An operator's own lines for the unit."""
        text = "\n".join(("[Service]", *lines, ""))
        self.write(f"/etc/systemd/system/{UNIT}.d/test.conf", text)
        await self.machine.run("systemctl", "daemon-reload")

    async def kill(self, signal: str) -> None:
        """Send the agent a signal."""
        await self.systemctl("kill", "--kill-who=main", f"--signal={signal}")

    async def clear(self) -> None:
        """No agent, nothing of an earlier test, and the kubelet there."""
        await self.machine.try_run("systemctl", "stop", UNIT)
        await self.machine.try_run("systemctl", "reset-failed", UNIT)
        await self.machine.try_run("systemctl", "disable", "--quiet", UNIT)
        for place in (f"/etc/systemd/system/{UNIT}.d", "/etc/hami-agent", "/var/lib/hami-agent"):
            await self.machine.run("rm", "-rf", place)
        self.settings()
        await self.machine.run("systemctl", "daemon-reload")
        await self.machine.run("journalctl", "--quiet", "--rotate", "--vacuum-time=1s")
        kubelet = self.cluster.kubelet
        await kubelet.kill()
        await kubelet.start()
        await self.offers(0)


@contextlib.asynccontextmanager
async def open_bare_metal(folder: Path, wheels: Path) -> AsyncIterator[BareMetal]:
    """Peers and machine, with what systemd/install needs and nothing installed.

    `wheels`: the folder of tests/systemd/wheels; the wheels of the agent itself lie in `folder`.

    Raises CannotBootError.
    """
    local = folder / "local"
    async with open_cluster(options(gpus=8)) as cluster:
        (local / "vgpu").mkdir(parents=True)
        place_library(local / "vgpu", Path("/usr/local"))
        binds = {
            cluster.places.root: KUBELET,
            local: "/usr/local",
            ROOT / "systemd": "/src/systemd",
            ROOT / "tests/systemd/lab/freeze": "/src/freeze",
            wheels: "/src/wheels",
            folder / "dist": "/src/dist",
        }
        async with booted(folder / "root", binds) as machine:
            yield BareMetal(machine, cluster, *free_ports(1))
