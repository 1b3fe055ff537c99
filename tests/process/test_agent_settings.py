"""The real process with the files of a HAMi release, and with profiles that follow the node."""

import asyncio
import contextlib
import dataclasses
import json
import re
import shlex
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.cluster import REGISTER
from agent.hami.annotations import read_register
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.lab.cluster import NAMESPACE, NODE, SandboxCluster, fetch, open_cluster
from agent.sandbox.scenario.facts import is_running, ledger_on_disk
from agent.sandbox.scenario.stage import Wish, Workload
from agent.settings.reading import COPY
from tests.fakes.config_map import MountedMap
from tests.process.agent_process import (
    PATIENCE,
    ROOT,
    comes,
    copied_settings,
    options,
    run,
    started,
)

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(120)]


# The real process follows its settings files, and starts with the last good ones.

SPREAD = 1.5
"""Seconds by which the reporter has written, if it had anything to write."""


@dataclass
class Following:
    """An agent with four GPUs that follows a ConfigMap of its own and HAMi's nodeconfig."""

    cluster: SandboxCluster
    mounted: MountedMap
    nodeconfig: Path

    def counts(self) -> tuple[int, int]:
        """Lists that the kubelet got, and writes that the API server got, Events aside."""
        writes = [
            call
            for call in self.cluster.api.journal.calls
            if call.user == self.cluster.user and call.verb == "patch" and call.resource == "nodes"
        ]
        return len(self.cluster.kubelet.history.of("listed")), len(writes)

    def told(self) -> Sequence[tuple[int, int, int]]:
        """Of the register annotation: index, split count and core share of each healthy GPU."""
        return [
            (gpu.index, gpu.split_count, gpu.core_percent)
            for gpu in read_register(self.cluster.node_annotations().get(REGISTER))
            if gpu.healthy
        ]

    async def until(self, holds: Callable[[], bool]) -> None:
        assert await self.cluster.until(holds, PATIENCE), (
            self.counts(),
            self.told(),
            self.cluster.allocatable(),
            self.cluster.log.last(10),
        )

    async def offers(self, slices: int, told: Sequence[tuple[int, int, int]]) -> None:
        """Both lists say so."""
        await self.until(lambda: self.cluster.allocatable() == slices and self.told() == told)

    def said(self, event: str) -> int:
        return len(self.cluster.log.of(event))

    def events(self) -> list[str]:
        """Texts of the Events ConfigRejected."""
        found = self.cluster.store.select("events")
        return [one["message"] for one in found if one["reason"] == "ConfigRejected"]

    async def rejects(self, times: int) -> None:
        """So many Events say what was wrong."""
        await self.until(lambda: len(self.events()) == times)

    def copied(self) -> bytes:
        """What the copy on disk has of our own file."""
        copy = copied_settings(self.cluster)
        return copy.own.content if copy and copy.own else b""


@contextlib.asynccontextmanager
async def following(tmp_path: Path, own: str) -> AsyncIterator[Following]:
    mounted, nodeconfig = MountedMap(tmp_path / "etc"), tmp_path / "config.json"
    mounted.write(config=own)
    nodeconfig.write_text('{"nodeconfig": []}')
    files = ("--config", f"{mounted.root}/config.yaml", "--nodeconfig", str(nodeconfig))
    async with open_cluster(options(*files, gpus=4)) as cluster:
        yield Following(cluster, mounted, nodeconfig)


def all_gpus(split_count: int, cores: int = 100) -> list[tuple[int, int, int]]:
    return [(index, split_count, cores) for index in range(4)]


async def test_every_kind_of_change_is_one_list_and_one_write(tmp_path):
    async with following(tmp_path, "sharing: {splitCount: 4}") as node:
        await started(node.cluster, 16)
        await node.offers(16, all_gpus(4))
        assert (1, 1) == node.counts()

        node.mounted.write(config="sharing: {splitCount: 6, coreScaling: 2}")
        await node.offers(24, all_gpus(6, 200))
        assert (2, 2) == node.counts()

        entry = {"name": NODE, "devicesplitcount": 5, "filterdevices": {"index": [0]}}
        node.nodeconfig.write_text(json.dumps({"nodeconfig": [entry]}))
        node.cluster.reload_agent()
        await node.offers(15, all_gpus(5, 200)[1:])
        assert (3, 3) == node.counts()

        node.mounted.write(config="report: {profile: colon}\nsharing: {coreScaling: 2}")
        node.cluster.reload_agent()
        await node.until(lambda: "hami-core:" in node.cluster.node_annotations()[REGISTER])
        assert (3, 4) == node.counts()

        node.mounted.write(config="sharing: {coreScaling: 2}")
        node.nodeconfig.unlink()
        node.nodeconfig.write_text('{"nodeconfig": []}')
        node.cluster.reload_agent()
        await node.offers(40, all_gpus(10, 200))
        await asyncio.sleep(SPREAD)
        assert (4, 5) == node.counts()
        assert 1 == len(node.cluster.kubelet.history.of("registered"))
        assert [] == node.events()


async def test_a_refused_start_goes_on_with_the_last_good_settings_and_follows_the_files(tmp_path):
    async with following(tmp_path, "sharing: {splitCount: 4}") as node:
        await started(node.cluster, 16)
        await node.until(lambda: node.copied() != b"")
        assert 0 == await node.cluster.stop_agent()
        node.mounted.write(config="sharing: {splitCuont: 4}")

        await node.cluster.start_agent()
        await node.rejects(1)
        await node.offers(16, all_gpus(4))
        await asyncio.sleep(SPREAD)
        assert 1 == node.said("config.rejected") == len(node.events())
        assert f"{node.mounted.root}/config.yaml:1:" in node.events()[0]
        assert b"sharing: {splitCount: 4}" == node.copied()

        node.mounted.write(config="sharing: {splitCount: 5}")
        await node.offers(20, all_gpus(5))


# With pods that hold slices, the resource keeps its name and the node its scheduler.

OLD, NEW = "nvidia.com/gpu", "example.com/vgpu"


def named(resource: str, scheduler: str = "hami") -> str:
    return f"scheduler: {scheduler}\nsharing:\n  resourceName: {resource}\n  splitCount: 4\n"


@contextlib.asynccontextmanager
async def a_node() -> AsyncIterator[SandboxCluster]:
    """One GPU of four slices, by the old name, and a pod that has one of them."""
    async with open_cluster(options(gpus=1)) as opened:
        opened.places.config.write_text(named(OLD))
        cluster = await started(opened, slices=4)
        await runs(cluster, "resident")
        assert await comes((cluster.places.state / COPY).exists)
        yield cluster


async def shows(cluster: SandboxCluster, *wanted: tuple[str, int]) -> bool:
    """Whether the kubelet comes to offer so many slices of each name."""

    def shown() -> bool:
        return all(cluster.kubelet.allocatable(name) == count for name, count in wanted)

    return await cluster.until(shown, PATIENCE)


async def runs(cluster: SandboxCluster, name: str) -> None:
    pod = Workload(name, "", (Wish("main", 1, 3000),)).pod()
    cluster.submit(pod)
    assert await cluster.until(lambda: is_running(cluster, name), PATIENCE), cluster.pod(name)


async def succeeds(cluster: SandboxCluster, name: str) -> None:
    """The pod has done its work; a kubelet that starts is looked at, and the row is closed."""
    await cluster.kubelet.pod_gone(cluster.pod(name)["metadata"]["uid"])
    done = {"status": {"phase": "Succeeded"}}
    cluster.store.update("pods", NAMESPACE, name, lambda held: merge_patch(held, done))
    await cluster.kubelet.restart()


def rows(cluster: SandboxCluster) -> dict[str, str]:
    """By what name each pod was answered."""
    return {row.pod: row.resource for row in ledger_on_disk(cluster).rows}


async def refusal(cluster: SandboxCluster) -> str:
    """The Event that says why the settings are refused."""

    def told() -> list[str]:
        found = cluster.store.select("events")
        return [one["message"] for one in found if one["reason"] == "ConfigRejected"]

    assert await cluster.until(lambda: bool(told()), PATIENCE), cluster.log.last(20)
    (text,) = told()
    return text


async def test_a_start_with_another_name_uses_the_last_good_settings_until_the_last_row():
    async with a_node() as cluster:
        await cluster.stop_agent()
        cluster.places.config.write_text(named(NEW))

        await started(cluster, slices=4)

        assert f"cannot change from {OLD} to {NEW}" in await refusal(cluster)
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        page = await fetch(cluster.web_address or "", "/readyz?verbose")
        why = "the last good settings apply, because these are refused: "
        where = f"{cluster.places.config}:3:17: sharing.res"
        assert f"[!]settings degraded: {why}{where}" in page.text
        await runs(cluster, "second")
        assert {"resident": OLD, "second": OLD} == rows(cluster)
        for name in ("second", "resident"):
            await succeeds(cluster, name)
        assert await shows(cluster, (NEW, 4), (OLD, 0)), cluster.log.last(20)


@pytest.mark.parametrize("by_flag", [True, False])
async def test_a_start_that_the_rows_refuse_and_no_copy_can_replace_ends_with_78(*, by_flag: bool):
    async with a_node() as cluster:
        await cluster.stop_agent()
        if by_flag:
            arguments = (*cluster.options.arguments, "--scheduler", "none")
            cluster.places.config.write_text(named(OLD).partition("\n")[2])
            cluster.options = dataclasses.replace(cluster.options, arguments=arguments)
        else:
            cluster.places.config.write_text(named(NEW))
            (cluster.places.state / COPY).unlink()

        await cluster.start_agent()

        assert await cluster.until(lambda: cluster.agent.code is not None, PATIENCE)
        assert 78 == cluster.agent.code
        (line,) = cluster.log.of("agent.failed", cluster.agent.pid)
        assert "cannot change from" in str(line.fields["err"])
        assert str(line.fields["err"]).endswith(
            "set it back, then drain the node while the agent runs"
        )
        assert {"resident": OLD} == rows(cluster)


# What SETTINGS.md tells to type works, as it stands there.

TEXT = (ROOT / "SETTINGS.md").read_text()
PROMPT = "hami-agent "


def told(verb: str) -> list[str]:
    """The arguments of the one command of that verb, without what stands behind them."""
    (line,) = re.findall(rf"^{re.escape(PROMPT)}({verb}\b.*)$", TEXT, re.MULTILINE)
    return shlex.split(line, comments=True)


def test_the_settings_are_shown_with_their_origin():
    shown = run(*told("config show"))

    assert (0, "") == (shown.returncode, shown.stderr)
    assert re.search(r"sharing\.splitCount +10 +default", shown.stdout)


def test_the_profile_that_the_page_shows_is_checked_and_taken(tmp_path: Path):
    (example,) = re.findall(r"^```\n(sharing:\n.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (file := tmp_path / "config.yaml").write_text(example)
    command = [str(file) if word == "FILE..." else word for word in told("config check")]

    checked = run(*command)

    assert 0 == checked.returncode, checked.stderr
    assert checked.stdout.endswith("ok\n")
    assert "the profile big" in checked.stderr


def test_all_files_of_a_node_are_checked_together(tmp_path: Path):
    (inline,) = re.findall(r"`hami-agent (config check config\.yaml [^`]+)`", TEXT)
    contents = {
        "config.yaml": "sharing: {splitCount: 20}\n",
        "device-config.yaml": "nvidia: {deviceMemoryScaling: 1.5}\n",
        "config.json": '{"nodeconfig": [{"name": "a", "devicesplitcount": 5}]}\n',
    }
    verb, check, *names = inline.split()
    assert list(contents) == names
    for name, content in contents.items():
        (tmp_path / name).write_text(content)

    checked = run(verb, check, *(str(tmp_path / name) for name in names))

    assert 0 == checked.returncode, checked.stderr
    assert re.search(
        r"^a\n +sharing\.splitCount +5 .*\n +sharing\.memoryScaling +1\.5 ", checked.stdout
    )


# What MIGRATION.md tells to type works, as it stands there.

MIGRATION_TEXT = (ROOT / "MIGRATION.md").read_text()


def test_an_annotation_is_decoded():
    (line,) = re.findall(r"^hami-agent (decode .+)$", MIGRATION_TEXT, re.MULTILINE)

    decoded = run(*shlex.split(line))

    assert 0 == decoded.returncode, decoded.stderr
    assert "GPU-1" in json.dumps(json.loads(decoded.stdout))
