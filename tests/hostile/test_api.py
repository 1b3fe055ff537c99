"""What authors of pods have the agent ask of the API server, and what they have it read."""

import asyncio
import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import AsyncIterator

from agent.kube.events import PODS_BURST, PODS_REFILL
from agent.kube.watches import LISTS, LISTS_REFILL
from agent.sandbox.api_errors import Json
from agent.sandbox.lab.cluster import NAMESPACE, NODE
from agent.sandbox.scenario.workloads import Wish, Workload
from agent.settle import REFUSED, REFUSED_REFILL
from tests.hostile.lab.attackers import AttackTally
from tests.hostile.lab.node import Node
from tests.hostile.lab.pods import PODS
from tests.hostile.lab.siege import Attack, Siege

AT_ONCE = 3
"""Forged pods that wait for the kubelet at any time."""
BIG = 8
"""Pods of a megabyte: more bytes than one answer of the API server may have."""


async def test_forged_pods_under_ever_new_names_are_no_storm_at_the_api_server(siege: Siege):
    attack = Attack("forged pods, ever new names", "4 31", 150, 30.0, 5.0)
    node, asked = siege.node, Counter[tuple[str, str]]()

    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        before = calls(node)
        async with asyncio.TaskGroup() as group:
            for number in range(AT_ONCE):
                hasty = number == 0
                group.create_task(forge(node, attack, tally, f"forged-{number}", hasty=hasty))
            yield
        asked.clear()
        asked.update(calls(node) - before)
        told = (f"{asked[one]} {name}" for one, name in COUNTED.items())
        tally.remark = ", ".join(told)

    tally = await siege.withstand(attack, begin)

    events, patches, lists = (asked[one] for one in COUNTED)
    assert events <= min(tally.tries + 5, PODS_BURST + attack.seconds / PODS_REFILL + 5)
    assert patches <= PODS + min(tally.tries, REFUSED + attack.seconds / REFUSED_REFILL)
    assert lists <= min(tally.tries, LISTS + attack.seconds / LISTS_REFILL) + 5


COUNTED = {
    ("create", "events"): "Events",
    ("patch", "pods"): "patches of pods",
    ("list", "pods"): "LISTs",
}


def calls(node: Node) -> Counter[tuple[str, str]]:
    """What the agent has asked of the API server since the start."""
    counts = node.cluster.api.journal.counts
    mine = {(verb, kind): n for (who, verb, kind), n in counts.items() if who == node.cluster.user}
    return Counter(mine)


async def forge(node: Node, attack: Attack, tally: AttackTally, name: str, *, hasty: bool) -> None:
    """A pod that another scheduler bound to the node, with a share that its author wrote; when it
    is refused it comes again, under the next name.

    They stay until the end; those of one who is `hasty` are deleted before the kubelet asks.
    """
    cluster = node.cluster
    uuid = cluster.hardware.states[0].gpu.uuid
    loop = asyncio.get_running_loop()
    began, names = loop.time(), list[str]()
    while len(names) < attack.most // AT_ONCE:
        # The kubelet admits one after the other: without a rate these would be all that it does.
        await asyncio.sleep(began + len(names) * AT_ONCE / attack.rate - loop.time())
        left = began + attack.seconds - loop.time()
        if left <= 0:
            break
        names.append(f"{name}-{len(names)}")
        uid = cluster.store.create("pods", forged(names[-1], uuid))["metadata"]["uid"]
        cluster.store.bind(NAMESPACE, names[-1], NODE)
        if hasty:
            cluster.store.delete("pods", NAMESPACE, names[-1], grace=0)
        over = await cluster.until(functools.partial(is_rejected, node, uid), left)
        tally.tries += over
    for one in filter(node.pods.exists, names):
        cluster.store.delete("pods", NAMESPACE, one)


def is_rejected(node: Node, uid: str) -> bool:
    """The kubelet has asked for it in vain."""
    return any(event.pod == uid for event in node.cluster.kubelet.history.of("rejected"))


def forged(name: str, uuid: str) -> Json:
    """A pod that asks for a GPU, and says that it was given one."""
    pod = Workload(name, "", (Wish("main", 1, 256),)).pod()
    share = f"{uuid},NVIDIA,1,1:;"
    pod["metadata"]["annotations"] = {
        "hami.io/vgpu-devices-allocated": share,
        "hami.io/vgpu-devices-to-allocate": share,
        "hami.io/bind-phase": "allocating",
        "hami.io/vgpu-node": NODE,
        "hami.io/bind-time": "1",
    }
    return pod


async def test_pods_of_a_megabyte_blind_nobody(siege: Siege):
    attack = Attack("eight pods of 1.1 MB, again and again", "8", 400, 30.0)

    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        store = siege.node.cluster.store
        async with asyncio.TaskGroup() as group:
            task = group.create_task(bloat(siege.node, tally))
            yield
            task.cancel()
        for number in range(BIG):
            store.delete("pods", NAMESPACE, f"big-{number}")

    await siege.withstand(attack, begin)


async def bloat(node: Node, tally: AttackTally) -> None:
    """The pods are there, and one of them changes now and then, so that it is told anew."""
    store = node.cluster.store
    for number in range(BIG):
        long = [{"name": "LONG", "value": "x" * 1_100_000}]
        notes = {"hami.io/bind-phase": "x" * 255_000}
        pod = {
            "metadata": {"name": f"big-{number}", "namespace": NAMESPACE, "annotations": notes},
            "spec": {"nodeName": NODE, "containers": [{"name": "main", "env": long}]},
        }
        store.create("pods", pod)
        tally.tries += 1
    for number in itertools.count():
        await asyncio.sleep(0.2)
        name = f"big-{number % BIG}"
        label = {"turn": f"{number}"}
        store.update("pods", NAMESPACE, name, functools.partial(labelled, label))
        tally.tries += 1


def labelled(label: dict[str, str], pod: Json) -> Json:
    """The pod with this label alone."""
    pod["metadata"]["labels"] = label
    return pod
