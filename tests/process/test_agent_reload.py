"""The real process follows its settings files, and starts with the last good ones."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.cluster import REGISTER
from agent.hami.register import read_register
from agent.sandbox.lab.cluster import NODE, SandboxCluster, open_cluster
from agent.settings.reading import COPY
from tests.fakes.config_map import MountedMap
from tests.process.agent_process import PATIENCE, copied_settings, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(90)]

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
async def following(
    tmp_path: Path, own: str, *more: str, gpus: int = 4
) -> AsyncIterator[Following]:
    mounted, nodeconfig = MountedMap(tmp_path / "etc"), tmp_path / "config.json"
    mounted.write(config=own)
    nodeconfig.write_text('{"nodeconfig": []}')
    files = ("--config", f"{mounted.root}/config.yaml", "--nodeconfig", str(nodeconfig))
    async with open_cluster(options(*files, *more, gpus=gpus)) as cluster:
        yield Following(cluster, mounted, nodeconfig)


def all_gpus(split_count: int, cores: int = 100) -> list[tuple[int, int, int]]:
    return [(index, split_count, cores) for index in range(4)]


async def test_every_kind_of_change_is_one_list_and_one_write(tmp_path):
    async with following(tmp_path, "sharing: {splitCount: 4}") as node:
        await started(node.cluster, 16)
        await node.offers(16, all_gpus(4))
        assert (1, 1) == node.counts()

        node.mounted.write(config="sharing: {splitCount: 6}")
        await node.offers(24, all_gpus(6))
        assert (2, 2) == node.counts()

        node.mounted.write(config="sharing: {splitCount: 6, coreScaling: 2}")
        await node.offers(24, all_gpus(6, 200))
        assert (2, 3) == node.counts()

        entry = {"name": NODE, "devicesplitcount": 5, "filterdevices": {"index": [0]}}
        node.nodeconfig.write_text(json.dumps({"nodeconfig": [entry]}))
        await node.offers(15, all_gpus(5, 200)[1:])
        assert (3, 4) == node.counts()

        node.mounted.write(config="sharing: {splitCount: 6, coreScaling: 2, operatingMode: mps}")
        await node.until(lambda: '"mode":"mps"' in node.cluster.node_annotations()[REGISTER])
        assert (3, 5) == node.counts()

        node.mounted.write(config="report: {profile: colon}\nsharing: {coreScaling: 2}")
        await node.until(lambda: "hami-core:" in node.cluster.node_annotations()[REGISTER])
        assert (3, 6) == node.counts()

        node.mounted.write(config="sharing: {coreScaling: 2}")
        node.nodeconfig.unlink()
        node.nodeconfig.write_text('{"nodeconfig": []}')
        await node.offers(40, all_gpus(10, 200))
        await asyncio.sleep(SPREAD)
        assert (4, 7) == node.counts()
        assert 1 == len(node.cluster.kubelet.history.of("registered"))
        assert [] == node.events()


async def test_a_hangup_reads_what_no_event_told_of(tmp_path):
    target = tmp_path / "elsewhere.yaml"
    target.write_text("sharing: {splitCount: 4}")
    (tmp_path / "linked.yaml").symlink_to(target)
    files = ("--config", str(tmp_path / "linked.yaml"))
    async with open_cluster(options(*files, gpus=1)) as cluster:
        await started(cluster, 4)
        cluster.reload_agent()
        assert await cluster.until(lambda: bool(cluster.log.of("config.unchanged")), PATIENCE)

        target.write_text("sharing: {splitCount: 5}")
        cluster.reload_agent()
        assert await cluster.until(lambda: cluster.allocatable() == 5, PATIENCE)
        assert cluster.agent.code is None
        assert 1 == len(cluster.kubelet.history.of("registered"))


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


async def test_a_refused_start_without_a_copy_is_78(tmp_path):
    async with following(tmp_path, "sharing: {splitCuont: 4}") as node:
        await node.cluster.start_agent()

        async with asyncio.timeout(PATIENCE):
            assert 78 == await node.cluster.agent.wait()
        assert not (node.cluster.places.state / COPY).exists()


async def test_a_first_start_with_a_list_too_large_is_78_with_one_error_and_one_event(tmp_path):
    async with following(tmp_path, "sharing: {splitCount: 10000}", gpus=8) as node:
        await node.cluster.start_agent()

        async with asyncio.timeout(PATIENCE):
            assert 78 == await node.cluster.agent.wait()
        errors = [line for line in node.cluster.log if line.fields.get("level") == "error"]
        assert ["agent.failed"] == [line.event for line in errors]
        assert [errors[0].fields["err"]] == node.events()
        assert "8 GPUs x 10000 slices x 66 bytes are a list of 5.0 MiB" in node.events()[0]
        assert 0 == node.cluster.allocatable()
