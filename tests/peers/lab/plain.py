"""A node without HAMi: only the kubelet, the default scheduler, and an agent in plain mode."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

import yaml

from agent.ledger import Row
from agent.state import decode_state
from tests.peers.lab.agents import RESOURCE, Agent
from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.grants import Container
from tests.peers.lab.node_state import until_allocatable, until_offered
from tests.peers.lab.part import Part
from tests.peers.lab.pods import a_container, a_pod, telling
from tests.peers.lab.space import until_answer

_WEBHOOKS: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
_DEFAULT: Final = "default-scheduler"


@contextlib.asynccontextmanager
async def without_hami(cluster: Cluster) -> AsyncIterator[None]:
    """No webhook, and a kube-scheduler that knows no extender, until the block ends."""
    scheduler, path = cluster.parts["kube-scheduler"], cluster.plane.root / "scheduler.json"
    before = path.read_text()
    configuration = yaml.safe_load(before)
    del configuration["extenders"]
    configuration["profiles"] = [{"schedulerName": _DEFAULT}]
    (webhook,) = (await cluster.api.get(_WEBHOOKS))["items"]
    await cluster.api.delete(f"{_WEBHOOKS}/{webhook['metadata']['name']}")
    await _restart(scheduler, lambda: path.write_text(yaml.safe_dump(configuration)))
    try:
        yield
    finally:
        await _restart(scheduler, lambda: path.write_text(before))
        fresh = {"metadata": {"name": webhook["metadata"]["name"]}}
        await cluster.api.create(_WEBHOOKS, {**webhook, **fresh})


async def _restart(part: Part, between: Callable[[], object]) -> None:
    await part.kill()
    between()
    await part.start()


async def start_plain_agent(
    cluster: Cluster, *flags: str, gpus: str = "h100:8", slices: int = 80, limits: bool = False
) -> Agent:
    """An agent with `scheduler: none`; returns when the Node offers its slices.

    Raises OSError, TimeoutError: it cannot be started, or does not register.
    """
    path = cluster.root / "plain.yaml"
    settings = {"scheduler": "none", "plain": {"memoryLimits": limits}}
    path.write_text(yaml.safe_dump(settings))
    made = await cluster.start_agent("--config", str(path), *flags, gpus=gpus)
    await until_allocatable(cluster, slices)
    await until_offered(cluster, slices)
    return made


def plain_pod(
    cluster: Cluster, name: str, *counts: int, inits: Sequence[int] = (), **spec: object
) -> Object:
    """A telling pod for the default scheduler, whose containers ask for so many slices."""

    def asking(kind: str, number: int, count: int, **more: str) -> Object:
        return a_container(f"{kind}{number}", gpus=count, memory=None, cores=None, **more)

    containers = [asking("c", number, count) for number, count in enumerate(counts or (1,))]
    first = [asking("i", number, count, script="true") for number, count in enumerate(inits)]
    pod = a_pod(name, *containers, inits=tuple(first), schedulerName=_DEFAULT, **spec)
    return telling(cluster, pod)


def plain_rows(cluster: Cluster) -> tuple[Row, ...]:
    """Plain mode's rows as they are on disk; none where nothing was written yet."""
    path = cluster.space.view / "var/lib/hami-agent/state.json"
    return decode_state(path.read_bytes()).ledger.rows if path.exists() else ()


def row_of(cluster: Cluster, pod: str, container: str = "c0") -> Row:
    """The row of which a container is the holder. Raises ValueError: it has none, or several."""
    holders = ((one.holder, one) for one in plain_rows(cluster))
    (row,) = (row for who, row in holders if who and (who.pod, who.container) == (pod, container))
    return row


def ids_by_holder(cluster: Cluster) -> Mapping[Container, list[frozenset[str]]]:
    """The ids that the rows give each container that is known to hold some."""
    found: dict[Container, list[frozenset[str]]] = {}
    for row in plain_rows(cluster):
        if who := row.holder:
            container = f"{who.namespace}/{who.pod}", who.container
            found.setdefault(container, []).append(frozenset(row.slice_ids))
    return found


async def until_agrees(cluster: Cluster, within: float = 30.0) -> None:
    """Return once the rows name those as holders, with those ids, that PodResources names.

    Raises TimeoutError: they differ.
    """

    async def agrees() -> bool:
        held = await cluster.kubelet.held(RESOURCE)
        return {who: [ids] for who, ids in held.items()} == ids_by_holder(cluster)

    await until_answer(agrees, within, lambda: f"the rows differ: {ids_by_holder(cluster)}")
