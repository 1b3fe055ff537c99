"""The explanation agrees with the scheduler's model, and each of its changes does what it says."""

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.kit.units import span
from agent.kube.reader import ClusterNode, ClusterSnapshot, ListedPod, PodEventView
from agent.model import GpuUuid, Share
from agent.sandbox.explain.decide import explain_pod
from agent.sandbox.explain.story import GateVerdict
from agent.sandbox.scheduler.filter import filter_pod
from agent.sandbox.scheduler.model import GpuView, RegisteredNode, SchedulerSettings
from agent.sandbox.scheduler.registry import Reservation, Usage, read_offer
from agent.sandbox.scheduler.verbs import encode_pod_devices
from tests.fakes.chance import Seeded
from tests.fakes.explain_rig import REGISTER, a_gpu, report_of
from tests.sandbox.explained import CORES, GPU, MEMORY, NOW, a_holder, a_pod, event, gate_of

TYPE = "nvidia.com/use-gputype"
ONE = {GPU: 1, MEMORY: 1}
HANDSHAKE = "hami.io/node-handshake"


def pod_of(limits: dict[str, int], annotations: dict[str, str] | None = None) -> dict[str, Any]:
    texts = {key: str(value) for key, value in limits.items()}
    return a_pod(limits=texts, metadata={"annotations": annotations or {}})


class RandomCluster:
    """Nodes with GPUs, some of them held."""

    def __init__(self, rng: random.Random, nodes: int) -> None:
        self.nodes: list[ClusterNode] = []
        self.holders: list[ListedPod] = []
        for place in range(nodes):
            gpus = [
                a_gpu(
                    f"GPU-{place}-{index}",
                    index,
                    rng.choice([16_000, 40_000]),
                    type_name=rng.choice(["NVIDIA A100", "NVIDIA H100"]),
                    healthy=rng.random() > 0.2,
                )
                for index in range(rng.randint(1, 3))
            ]
            self.nodes.append(ClusterNode(f"n{place}", {REGISTER: report_of(*gpus)}, slices=10))
            for gpu in gpus:
                if rng.random() < 0.7:
                    share = Share(gpu.uuid, rng.randrange(0, 16_000), rng.choice([0, 30, 90]))
                    text = encode_pod_devices([[share]])
                    name = f"h-{gpu.uuid}"
                    self.holders.append(a_holder(name, text, chosen=f"n{place}"))

    def snapshot(
        self, pod: dict[str, Any], events: tuple[PodEventView, ...] = ()
    ) -> ClusterSnapshot:
        tried = (event("FilteringSucceed", "find fit node(n0), 0 nodes not fit", 20),)
        nodes, holders = tuple(self.nodes), tuple(self.holders)
        return ClusterSnapshot(pod, NOW, nodes, holders, events=events or tried)

    def placed(self, pod: dict[str, Any], without: str = "", repaired: str = "") -> bool:
        """Whether the model, asked without any part of `explain`, places the pod."""
        usage = Usage()
        for holder in self.holders:
            if holder.name != without:
                uuid, _, memory, cores = holder.shares.rstrip(";:").split(",")
                share = Share(GpuUuid(uuid), int(memory), int(cores))
                usage.reserve(holder.uid, Reservation(holder.chosen, [[share]], 0))
        registered: dict[str, RegisteredNode] = {}
        for node in self.nodes:
            offer = read_offer(node.annotations)
            assert offer is not None
            gpus = [
                replace(one, healthy=one.healthy or one.uuid == repaired)
                for one in (view.capacity for view in offer.gpus)
            ]
            node_now = RegisteredNode(tuple(map(GpuView, gpus)))
            registered[node.name] = node_now.with_loads(usage.loads(node.name))
        names = list(registered)
        return bool(filter_pod(pod, names, registered, SchedulerSettings(), Seeded()).nodes)


def with_limit(pod: dict[str, Any], key: str, most: int) -> dict[str, Any]:
    limits = dict(pod["spec"]["containers"][0]["resources"]["limits"])
    limits[key] = str(min(int(limits[key]), most))
    return pod_of(
        {name: int(text) for name, text in limits.items()}, pod["metadata"]["annotations"]
    )


def changed(cluster: RandomCluster, pod: dict[str, Any], said: str) -> bool:
    """Whether the pod is placed after one change, read from its sentence."""
    if asked := re.fullmatch(
        r"ask for at most ([\d,]+) \S+.* \((nvidia\.com/\w+)\) instead .*", said
    ):
        most = int(asked[1].replace(",", ""))
        smaller, greater = (with_limit(pod, asked[2], limit) for limit in (most, most + 1))
        return cluster.placed(smaller) and not cluster.placed(greater)
    if dropped := re.fullmatch(r"drop the annotation (\S+)", said):
        marks = {
            key: text for key, text in pod["metadata"]["annotations"].items() if key != dropped[1]
        }
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        return cluster.placed(pod_of({key: int(text) for key, text in limits.items()}, marks))
    if repaired := re.fullmatch(r"repair GPU \d+ \((\S+)\) of n\d, which is unhealthy", said):
        return cluster.placed(pod, repaired=repaired[1])
    waited = re.fullmatch(r"wait for d/(\S+) to end, or end it \(.*\)", said)
    assert waited, said
    return cluster.placed(pod, without=waited[1])


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    nodes=st.integers(1, 4),
    count=st.integers(1, 3),
    memory=st.sampled_from([1000, 8000, 14_000, 20_000, 60_000]),
    cores=st.sampled_from([0, 20, 80, 100]),
    kind=st.sampled_from(["", "A100", "H100", "T4"]),
)
def test_the_explanation_is_the_models_answer_and_each_change_places_the_pod(
    seed: int, nodes: int, count: int, memory: int, cores: int, kind: str
):
    cluster = RandomCluster(random.Random(seed), nodes)  # noqa: S311 -- hypothesis chose the seed
    pod = pod_of({GPU: count, MEMORY: memory, CORES: cores}, {TYPE: kind} if kind else {})

    explanation = explain_pod(cluster.snapshot(pod), NOW)

    gate = gate_of(explanation, "placement")
    assert cluster.placed(pod) == (gate.verdict is not GateVerdict.BLOCKED)
    assert (gate.verdict is GateVerdict.BLOCKED) == bool(gate.reason)
    if gate.verdict is not GateVerdict.BLOCKED:
        assert () == explanation.changes
    for change in explanation.changes:
        assert changed(cluster, pod, change.said), change.said


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (119, "119 s"), (120, "2 min"), (3700, "1 h 1 min"), (86_400 * 3 + 59, "3 d")],
)
def test_a_duration_has_its_greatest_units(seconds: float, text: str):
    assert text == span(seconds)
