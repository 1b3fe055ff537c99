"""The real process: signals, restarts, a second instance."""

import asyncio

import grpc
import pytest

from agent.host.process import machine_id
from agent.ledger import Ledger, State, container_directory
from agent.sandbox.lab.cluster import open_cluster
from agent.sandbox.lab.web import fetch
from agent.state import StateEncoder
from tests.builders import G1, G2, NOON, a_row
from tests.fakes.grpc_messages import GrpcPlugin
from tests.process.agent_process import PATIENCE, offers, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(60)]


def sockets(cluster):
    return {path.name for path in cluster.places.plugins.glob("*.sock")}


async def test_sigterm_ends_it_with_0_and_takes_its_socket_away():
    async with open_cluster(options()) as opened:
        cluster = await started(opened)
        assert 2 == len(sockets(cluster))

        code = await cluster.stop_agent()

        assert 0 == code
        assert {"kubelet.sock"} == sockets(cluster)
        assert ["agent.stopped"] == [line.event for line in cluster.log if line.event][-1:]


async def test_after_sigkill_the_next_agent_serves_on():
    async with open_cluster(options()) as opened:
        cluster = await started(opened)
        left = sockets(cluster)

        await cluster.kill_agent()
        assert -9 == cluster.agent.code
        assert await offers(cluster, 0)
        await started(cluster)

        assert 2 == len(sockets(cluster))
        assert sockets(cluster) != left


async def test_a_second_instance_stands_by_and_takes_over():
    async with open_cluster(options()) as opened:
        cluster = await started(opened)
        first = cluster.agent
        await cluster.start_agent()
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        page = await fetch(cluster.web_address or "", "/readyz")
        assert 503 == page.status
        assert f"standby: another agent runs on this host (pid {first.pid}" in page.text
        assert 200 == (await fetch(cluster.web_address or "", "/readyz?standby")).status
        assert 1 == len(cluster.kubelet.history.of("registered"))

        assert 0 == await first.stop()

        assert await cluster.until(
            lambda: len(cluster.kubelet.history.of("registered")) == 2, PATIENCE
        )
        assert await offers(cluster, 80)
        assert cluster.agent.code is None


async def test_a_standby_that_is_told_to_stop_leaves_the_other_alone():
    async with open_cluster(options()) as opened:
        cluster = await started(opened)
        first = cluster.agent
        second = await cluster.start_agent()
        assert await cluster.until(
            lambda: bool(cluster.log.of("web.listening", second.pid)), PATIENCE
        )

        assert 0 == await second.stop()

        assert first.code is None
        assert 80 == cluster.allocatable()


async def test_a_standby_that_could_not_take_over_says_so_at_once():
    async with open_cluster(options()) as opened:
        cluster = await started(opened)
        first = cluster.agent
        cluster.places.kubeconfig.rename(cluster.places.kubeconfig.with_suffix(".away"))
        second = await cluster.start_agent()

        assert await cluster.until(lambda: second.code is not None, PATIENCE)

        assert 78 == second.code
        (line,) = cluster.log.of("agent.failed", second.pid)
        assert str(cluster.places.kubeconfig) in str(line.fields["err"])
        assert first.code is None
        assert 80 == cluster.allocatable()


async def test_it_reads_nothing_of_other_pods_and_writes_nothing_but_the_annotation():
    async with open_cluster(options()) as opened:
        cluster = await started(opened)
        journal, user = cluster.api.journal, cluster.user
        assert await cluster.until(lambda: journal.writes(user) > 0, PATIENCE)
        assert await cluster.until(lambda: journal.watches(user) > 1, PATIENCE)

        assert {
            (user, "watch", "nodes"): 1,
            (user, "list", "pods"): 1,
            (user, "watch", "pods"): 1,
            (user, "patch", "nodes"): 1,
        } == dict(journal.counts)


async def test_a_broken_directory_is_one_containers_trouble_and_not_the_nodes():
    async with open_cluster(options()) as opened:
        good = a_row()
        bad = a_row(container="No-Label", slice_ids=(f"{G1}-7",))
        ledger = Ledger(rows=(good, bad))
        state = State(generation=1, machine_id=machine_id(), ledger=ledger)
        containers = opened.places.hook / "vgpu" / "containers"
        containers.mkdir()
        leaf = containers / container_directory(good.key.pod_uid, good.key.container)
        leaf.write_text("")
        opened.places.state.mkdir(exist_ok=True)
        (opened.places.state / "state.json").write_bytes(StateEncoder().encode(state))

        cluster = await started(opened)

        (line,) = cluster.log.of("hooks.not_prepared")
        assert "No-Label" in str(line.fields["err"])
        assert leaf.is_dir()


async def test_with_a_fence_the_kubelet_asks_before_a_start_and_is_answered_from_the_ledger():
    still_young = NOON.replace(year=9999)
    row = a_row(slice_ids=(f"{G2}-0",), offered=True, answered_at=still_young)
    async with open_cluster(options("--fence", "prestart")) as opened:
        state = State(machine_id=machine_id(), ledger=Ledger((row,)))
        opened.places.state.mkdir(parents=True, exist_ok=True)
        (opened.places.state / "state.json").write_bytes(StateEncoder().encode(state))
        cluster = await started(opened)
        (endpoint,) = sockets(cluster) - {"kubelet.sock"}
        plugin = GrpcPlugin(cluster.places.plugins / endpoint)

        assert (await asyncio.to_thread(plugin.options)).pre_start_required
        with pytest.raises(grpc.RpcError, match="HA-4006"):
            await asyncio.to_thread(plugin.pre_start, list(row.slice_ids))
        await asyncio.to_thread(plugin.pre_start, [f"{G1}-0"])
        plugin.close()
