"""The same cluster twice: the fake API server, and the real adapter on the API server model.

A contract test acts on the cluster as somebody else does (`create_node`, `delete_pod`, …) and looks
through the ports (`node_api`, `pod_api`).
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from agent.kit.timing import SystemClock
from agent.kube.client import Connection, KubeSession
from agent.kube.objects import EventPoster, KubeApi, decode_pod
from agent.ports import NodeApi, PodApi
from agent.sandbox.apiserver import ApiServerModel
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.store import ObjectStore
from tests.builders import NODE, a_pod, a_pod_uid
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import Seeded

RESOURCE = "nvidia.com/gpu"
NAMESPACE = "team-a"
KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{server}"}}}}]
users: [{{name: u, user: {{token: "{token}"}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""


class FakeWorld:
    """In memory."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self._born = 0

    @property
    def node_api(self) -> NodeApi:
        return self.api

    @property
    def pod_api(self) -> PodApi:
        return self.api

    def create_node(self, annotations: Mapping[str, str]) -> None:
        self.api.create_node(annotations)

    def edit_node(self, annotations: Mapping[str, str | None]) -> None:
        self.api.edit_node(annotations)

    def delete_node(self) -> None:
        self.api.delete_node()

    def node_annotations(self) -> Mapping[str, str]:
        assert self.api.node is not None
        return self.api.node.annotations

    def create_pod(self, name: str, node: str = NODE) -> str:
        self._born += 1
        return self.api.put_pod(a_pod(uid=a_pod_uid(self._born), name=name, node=node)).uid

    def edit_pod(self, name: str, annotations: Mapping[str, str | None]) -> None:
        self.api.edit_pod(NAMESPACE, name, annotations)

    def delete_pod(self, name: str) -> None:
        self.api.delete_pod(NAMESPACE, name)

    def pod_annotations(self, name: str) -> Mapping[str, str]:
        return self.api.pods[NAMESPACE, name].annotations

    def throttle(self, count: int, retry_after: int) -> None:
        self.api.throttle(count, retry_after)

    async def begin_outage(self) -> None:
        self.api.begin_outage()

    async def end_outage(self) -> None:
        self.api.end_outage()

    def end_watches(self) -> None:
        self.api.end_watches()

    def forget_history(self) -> None:
        self.api.forget_history()


class ModelWorld:
    """Real HTTP to the API server model, as this node's own identity."""

    def __init__(self, folder: Path, identity: str = f"system:node:{NODE}") -> None:
        self.store = ObjectStore(SystemClock(), Seeded(7))
        self.model = ApiServerModel(self.store, {"secret": identity})
        self.kubeconfig = folder / "kubeconfig"
        self.session = KubeSession(Connection(self.kubeconfig), Seeded(7))
        self.poster = EventPoster(self.session, NODE, SystemClock())
        self._api = KubeApi(self.session, NODE, RESOURCE)

    @property
    def node_api(self) -> NodeApi:
        return self._api

    @property
    def pod_api(self) -> PodApi:
        return self._api

    def use_token(self, token: str) -> None:
        """Write the kubeconfig, for the first time or again."""
        text = KUBECONFIG.format(server=self.model.url, token=token)
        self.kubeconfig.write_text(text, encoding="utf-8")

    def create_node(self, annotations: Mapping[str, str]) -> None:
        metadata = {"name": NODE, "annotations": dict(annotations)}
        self.store.create("nodes", {"metadata": metadata})

    def edit_node(self, annotations: Mapping[str, str | None]) -> None:
        self._edit("nodes", "", NODE, annotations)

    def delete_node(self) -> None:
        self.store.delete("nodes", "", NODE)

    def node_annotations(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.store.get("nodes", "", NODE)["metadata"]["annotations"]
        return found

    def create_pod(self, name: str, node: str = NODE, **metadata: object) -> str:
        limits = {"resources": {"limits": {RESOURCE: "1"}}}
        spec = {"nodeName": node, "containers": [{"name": "main", **limits}]}
        metadata |= {"name": name, "namespace": NAMESPACE}
        created = self.store.create("pods", {"metadata": metadata, "spec": spec})
        return decode_pod(created, RESOURCE).uid

    def edit_pod(self, name: str, annotations: Mapping[str, str | None]) -> None:
        self._edit("pods", NAMESPACE, name, annotations)

    def delete_pod(self, name: str) -> None:
        self.store.delete("pods", NAMESPACE, name, grace=0)

    def pod_annotations(self, name: str) -> Mapping[str, str]:
        metadata: Mapping[str, Any] = self.store.get("pods", NAMESPACE, name)["metadata"]
        return metadata.get("annotations") or {}

    def events(self) -> list[str]:
        return [event["reason"] for event in self.store.select("events")]

    def throttle(self, count: int, retry_after: int) -> None:
        self.model.throttle(count, retry_after)

    async def begin_outage(self) -> None:
        await self.model.stop()

    async def end_outage(self) -> None:
        await self.model.start()

    def end_watches(self) -> None:
        self.model.end_watches()

    def forget_history(self) -> None:
        self.model.forget_history()

    def _edit(
        self, resource: str, namespace: str, name: str, annotations: Mapping[str, str | None]
    ) -> None:
        def change(obj: dict[str, Any]) -> dict[str, Any]:
            return merge_patch(obj, {"metadata": {"annotations": dict(annotations)}})

        self.store.update(resource, namespace, name, change)


KubeWorld = FakeWorld | ModelWorld
"""What a contract test holds in its hands."""


@contextlib.asynccontextmanager
async def model_world(
    folder: Path, identity: str = f"system:node:{NODE}"
) -> AsyncIterator[ModelWorld]:
    """A listening API server model and a session on it."""
    world = ModelWorld(folder, identity)
    await world.model.start()
    world.use_token("secret")
    try:
        yield world
    finally:
        await world.session.close()
        await world.model.stop()


@contextlib.asynccontextmanager
async def a_world(
    kind: str, folder: Path, identity: str = f"system:node:{NODE}"
) -> AsyncIterator[KubeWorld]:
    """`fake` or `model`; `identity` is who the model knows the agent as."""
    if kind == "fake":
        yield FakeWorld()
        return
    async with model_world(folder, identity) as world:
        yield world
