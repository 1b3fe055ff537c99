"""A whole agent in this process, on real files and sockets: how it starts, and why it ends."""

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import structlog

from agent.app.main import run_agent
from agent.cli.config import started
from agent.host.system import LockFile
from agent.inventory import InventoryKeeper
from agent.kit import tasks
from agent.ledger import LastGood, SourceFile
from agent.settings.reading import COPY, Sources
from agent.state import CURRENT, LAST_GOOD_KIND, seal

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

UNREACHABLE = """
apiVersion: v1
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
users: [{name: u, user: {token: t}}]
"""
"""A kubeconfig of an API server that nobody serves."""


class Host:
    """The directories of one agent, and what it logged."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.logs: list[MutableMapping[str, Any]] = []
        self.web_port = 0
        for name in ("plugins", "state", "run", "vgpu"):
            (root / name).mkdir()
        (root / "kubeconfig").write_text(UNREACHABLE)

    @property
    def said(self) -> dict[object, object]:
        """The events of the log, with what is wrong."""
        return {line["event"]: line.get("err") for line in self.logs}

    def run(self, own: str, *, until: str = "") -> int:
        """Run an agent with this file to its end; return the exit code.

        `until`: the event of the log after which it gets SIGTERM.
        """
        (self.root / "own").write_text(own)
        flags = {
            "--node-name": "node-a",
            "--simulate": "h100:8",
            "--kubelet-socket": f"{self.root}/plugins/kubelet.sock",
            "--pod-resources-socket": f"{self.root}/pod-resources.sock",
            "--state-dir": f"{self.root}/state",
            "--run-dir": f"{self.root}/run",
            "--hook-path": f"{self.root}",
            "--web-port": str(self.web_port),
        }
        origin = Sources(self.root / "own", {}, flags, "node-a")
        start = asyncio.run(started(origin))
        settings = start.taken().settings()

        async def live() -> int:
            async with asyncio.TaskGroup() as group:
                agent = group.create_task(run_agent(origin, start, settings))
                while until not in {"", *self.said} and not agent.done():  # noqa: ASYNC110 -- a log
                    await asyncio.sleep(0.01)
                if until and not agent.done():
                    os.kill(os.getpid(), signal.SIGTERM)
            return agent.result()

        with structlog.testing.capture_logs() as self.logs:
            return asyncio.run(live())


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    yield Host(tmp_path)
    gc.unfreeze()  # a start freezes what is there


def test_what_cannot_be_read_of_the_former_agent_is_said_and_does_not_hold_up_the_start(host):
    for name in (CURRENT, COPY):
        (host.root / "state" / name).write_text("{")

    assert 0 == host.run("scheduler: none", until="config.copied")

    warned = {"state.recovered", "config.copy_unreadable"}
    assert {*warned, "agent.stopped"} <= host.said.keys()
    assert b"{" != (host.root / "state" / COPY).read_bytes()


def test_a_part_that_fails_again_and_again_ends_the_agent_as_a_defect(host, monkeypatch):
    async def broken(_: InventoryKeeper) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(tasks, "DEFECTS", 0)
    monkeypatch.setattr(InventoryKeeper, "run", broken)

    assert 70 == host.run("scheduler: none")
    gave_up = "inventory failed too often and was given up: a defect"
    assert gave_up == host.said["agent.failed"]


def test_refused_settings_and_a_copy_without_a_way_to_the_api_server_are_both_said(host):
    own = f"node: {{kubeconfig: {host.root}/absent}}"
    copy = SourceFile(f"{host.root}/own", own.encode())
    path = host.root / "state" / COPY
    path.write_bytes(seal(LAST_GOOD_KIND, LastGood("0.1.0", "node-a", own=copy)))

    assert 78 == host.run("sharing: 7")
    assert f"{host.root}/absent" in str(host.said["agent.failed"])
    assert f"{host.root}/own:1:10: keys and values" in str(host.said["config.rejected"])


def test_a_standby_whose_port_is_taken_waits_all_the_same_and_stops_when_it_is_told(host):
    lock = LockFile(host.root / "run" / "lock")
    assert lock.try_take()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        host.web_port = taken.getsockname()[1]

        assert 0 == host.run("{scheduler: none, web: {address: 127.0.0.1}}", until="lock.standby")
    assert "cannot be bound" in str(host.said["standby.without_web"])
    assert "lock.taken" not in host.said
    lock.release()
