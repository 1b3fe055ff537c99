"""Pods with bad annotations on a real agent: each is rejected and settled, and nobody else is."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from agent.cluster import (
    ALLOCATED,
    BIND_PHASE,
    BIND_TIME,
    MUTEX_LOCK,
    PHASE_ALLOCATING,
    PHASE_FAILED,
    PHASE_SUCCESS,
    REGISTER,
    TO_ALLOCATE,
    VGPU_NODE,
)
from agent.hami.pod import encode_node_lock
from agent.hami.register import decode_register
from agent.host.process import SystemClock
from agent.ledger import Ledger
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.lab.cluster import NAMESPACE, NODE, RESOURCE, SandboxCluster, fetch, open_cluster
from agent.sandbox.scenario.facts import is_running, pod_facts
from agent.sandbox.scenario.stage import Wish, Workload
from agent.state import CURRENT, decode_state
from tests.process.agent_process import PATIENCE, offers, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(90)]


class Hand:
    """Writes what HAMi's scheduler writes, and what it never would."""

    def __init__(self, cluster: SandboxCluster) -> None:
        self.cluster = cluster
        self.stamp = SystemClock().now()
        self.gpu = decode_register(cluster.node_annotations()[REGISTER])[0].uuid

    def lock(self, name: str) -> str:
        """The node lock is that pod's."""
        text = encode_node_lock(self.stamp, NAMESPACE, name)
        changes = {"metadata": {"annotations": {MUTEX_LOCK: text}}}
        self.cluster.store.update("nodes", "", NODE, lambda held: merge_patch(held, changes))
        return text

    def bind(self, name: str, text: str, *, count: int = 1, node: str = NODE) -> None:
        """A pod with that devices text, on this node."""
        notes = {
            VGPU_NODE: node,
            ALLOCATED: text,
            TO_ALLOCATE: text,
            BIND_PHASE: PHASE_ALLOCATING,
            BIND_TIME: str(int(self.stamp.timestamp())),
        }
        limits = {RESOURCE: str(count)}
        self.cluster.store.create(
            "pods",
            {
                "metadata": {"name": name, "namespace": NAMESPACE, "annotations": notes},
                "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
            },
        )
        self.cluster.store.bind(NAMESPACE, name, NODE)

    def notes(self, name: str) -> Mapping[str, str]:
        found: Mapping[str, str] = self.cluster.pod(name)["metadata"].get("annotations") or {}
        return found

    def message(self, name: str) -> str:
        return str(self.cluster.pod(name)["status"].get("message", ""))

    @property
    def held(self) -> str | None:
        return self.cluster.node_annotations().get(MUTEX_LOCK)

    def ledger(self) -> Ledger:
        """What is on the agent's disk."""
        return decode_state((self.cluster.places.state / CURRENT).read_bytes()).ledger

    async def served(self, name: str) -> None:
        await self.sees(lambda: self.notes(name)[BIND_PHASE] == PHASE_SUCCESS, name)

    async def settled_as_failed(self, name: str) -> None:
        await self.sees(lambda: self.notes(name)[BIND_PHASE] == PHASE_FAILED, name)
        assert "Failed" == self.cluster.pod(name)["status"]["phase"]

    async def sees(self, holds, name: str = "") -> None:
        seen = await self.cluster.until(holds, PATIENCE)
        assert seen, (self.message(name) if name else "", self.cluster.log.last(20))


@asynccontextmanager
async def a_hand() -> AsyncIterator[Hand]:
    """A node that serves, and on which one pod holds its share."""
    async with open_cluster(options(gpus=2)) as opened:
        cluster = await started(opened, slices=20)
        assert await cluster.until(lambda: REGISTER in cluster.node_annotations(), PATIENCE)
        hand = Hand(cluster)
        hand.lock("served")
        hand.bind("served", f"{hand.gpu},NVIDIA,3000,30:;")
        await hand.served("served")
        await hand.sees(lambda: hand.held is None)
        yield hand


async def test_a_pod_with_a_bad_annotation_is_settled_and_its_lock_is_given_back():
    async with a_hand() as hand:
        gpu = hand.gpu
        bad = (
            ("HA-3004", f"{gpu},NVIDIA,1,1:;{gpu},NVIDIA,1,1:;", NODE),
            ("HA-4001", "GPU-00000000-1111-2222-3333-444444444444,NVIDIA,1,1:;", NODE),
            ("HA-4003", f"{gpu},NVIDIA,80000,1:;", NODE),
            ("HA-3002", f"{gpu},NVIDIA,-1,1:;", NODE),
            ("HA-3002", f"{gpu},MLU,1,1:;", NODE),
            ("HA-3003", f"{gpu},NVIDIA,1,1:;", "another"),
        )
        rows = [row.key for row in hand.ledger().rows]
        assert 1 == len(rows)

        for number, (gate, text, node) in enumerate(bad):
            name = f"bad-{number}"
            hand.lock(name)
            hand.bind(name, text, node=node)

            await hand.settled_as_failed(name)

            message = hand.message(name)
            assert "code = FailedPrecondition desc = " in message
            assert f"{NAMESPACE}/{name}" in message
            assert f"[{gate}]" in message
            assert text == hand.notes(name)[ALLOCATED]
            await hand.sees(lambda: hand.held is None)
            assert rows == [row.key for row in hand.ledger().rows]

        assert "Running" == hand.cluster.pod("served")["status"]["phase"]
        assert PHASE_SUCCESS == hand.notes("served")[BIND_PHASE]


async def test_a_rejected_pod_takes_nothing_from_its_neighbour_that_holds_the_lock():
    async with a_hand() as hand:
        held = hand.lock("neighbour")
        hand.bind("stray", f"{hand.gpu},NVIDIA,-1,1:;", count=2)

        await hand.settled_as_failed("stray")

        assert f"is placing {NAMESPACE}/neighbour" in hand.message("stray")
        assert held == hand.held
        hand.bind("neighbour", f"{hand.gpu},NVIDIA,4000,40:;")
        await hand.served("neighbour")
        await hand.sees(lambda: hand.held is None)
        assert ["served", "neighbour"] == [row.pod for row in hand.ledger().rows]


async def test_ten_thousand_slices_are_refused_by_the_kubelet_before_anybody_is_asked():
    async with a_hand() as hand:
        hand.lock("greedy")
        hand.bind("greedy", f"{hand.gpu},NVIDIA,1,1:;", count=10_000)

        await hand.sees(lambda: hand.cluster.pod("greedy")["status"].get("phase") == "Failed")

        assert "10000" in hand.message("greedy")
        await hand.sees(lambda: hand.held is None)
        assert ["served"] == [row.pod for row in hand.ledger().rows]


# Pods of a megabyte, which any tenant can create, do not keep a real agent from serving others.


def add_big_pods(cluster: SandboxCluster) -> None:
    """More bytes than one answer may have, in variables and in annotations."""
    for number in range(8):
        long = [{"name": "LONG", "value": "x" * 1_100_000}]
        notes = {"hami.io/bind-phase": "x" * 255_000}
        cluster.store.create(
            "pods",
            {
                "metadata": {
                    "name": f"big-{number}",
                    "namespace": NAMESPACE,
                    "annotations": notes,
                },
                "spec": {"nodeName": NODE, "containers": [{"name": "main", "env": long}]},
            },
        )


async def is_served(cluster: SandboxCluster, name: str) -> bool:
    limits = {RESOURCE: "1", "nvidia.com/gpumem": "1000"}
    cluster.submit(
        {
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
        }
    )

    def served() -> bool:
        notes = cluster.pod(name)["metadata"].get("annotations") or {}
        return notes.get(BIND_PHASE) == PHASE_SUCCESS

    return await cluster.until(served, PATIENCE)


async def test_beside_big_pods_the_next_agent_serves_too():
    async with open_cluster(options(gpus=2)) as opened:
        cluster = await started(opened, slices=20)
        assert await cluster.until(lambda: REGISTER in cluster.node_annotations(), PATIENCE)
        add_big_pods(cluster)
        assert await is_served(cluster, "first"), cluster.log.last(20)

        await cluster.kill_agent()
        assert await offers(cluster, 0)
        await started(cluster, slices=20)
        agent = cluster.agent.pid
        listed = await cluster.until(lambda: bool(cluster.log.of("pods.listed", agent)), PATIENCE)
        assert listed, cluster.log.last(20)

        assert await is_served(cluster, "second"), cluster.log.last(20)
        assert not cluster.log.of("pods.lost")


# A real agent that would refuse every new pod: no pod is sent there, and what runs goes on.


def well(cluster: SandboxCluster) -> list[bool]:
    """The health of each GPU in the annotation."""
    text = cluster.node_annotations().get(REGISTER, "[]")
    return [gpu.healthy for gpu in decode_register(text)]


def told(cluster: SandboxCluster) -> list[str]:
    """What the Events say that nothing is offered."""
    events = cluster.store.select("events")
    return [one["message"] for one in events if one["reason"] == "NothingOffered"]


async def test_without_the_library_no_pod_is_sent_here_and_the_one_that_runs_goes_on():
    async with open_cluster(options(gpus=2)) as cluster:
        await started(cluster, slices=20)
        cluster.submit(Workload("first", "", (Wish("main", 1, 1024),)).pod())
        assert await cluster.until(lambda: is_running(cluster, "first"), PATIENCE)

        (cluster.places.hook / "vgpu" / "libvgpu.so").unlink()
        assert await offers(cluster, 0)
        assert await cluster.until(lambda: [False, False] == well(cluster), PATIENCE)
        assert await cluster.until(lambda: told(cluster) != [], PATIENCE)
        cluster.submit(Workload("second", "", (Wish("main", 1, 1024),)).pod())
        page = await fetch(cluster.web_address or "", "/readyz?verbose")

        assert "[!]offer degraded: no slice is on offer: HAMi-core is not installed" in page.text
        assert 200 == page.status
        assert 1 == len(told(cluster))
        assert is_running(cluster, "first")
        assert "Pending" == pod_facts(cluster, "second").phase
