"""Reads one pod and the parts of the cluster that decide about it."""

import difflib
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import msgspec

from agent.codec import cluster as codec
from agent.codec.narrow import Raw
from agent.core.cluster import annotations
from agent.core.cluster.snapshot import (
    AgentPod,
    ClusterNode,
    ClusterSnapshot,
    GpuHolder,
    JsonObject,
    RefusedPod,
    Unread,
)
from agent.core.errors import ApiError, ApiForbidden, MalformedText
from agent.core.ports import Clock
from agent.host.kube.lists import EndlessList, Lists, command_budget
from agent.host.kube.session import ApiRequest, KubeSession, path_of

METADATA_LIST: Final = (
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
)
NEAREST: Final = 3
AGENTS: Final = "app.kubernetes.io/name=hami-agent"
"""The label of the agents' pods in chart and manifests."""
UNFINISHED: Final = "status.phase!=Succeeded,status.phase!=Failed"
JSON_FORM: Final = "["
"""The first character of a register annotation for schedulers from 2.8 on."""

T = TypeVar("T")


class NoSuchPod(msgspec.Struct, frozen=True):
    """There is no pod of that name. `nearest`: similar names of the namespace.

    `elsewhere`: other namespaces with a pod of exactly that name. `unread`: why the names could not
    be listed; empty if they were.
    """

    nearest: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    unread: str = ""


class ClusterReader:
    """Reads parts of a cluster, each with LISTs in pages; each answer has 10 s."""

    def __init__(self, session: KubeSession, clock: Clock) -> None:
        self._session = session
        self._clock = clock
        self._budget = command_budget()
        self._unread: list[Unread] = []
        self._is_silent = False
        """It gave no answer: each further request would only wait for its deadline."""

    async def snapshot(self, namespace: str, name: str) -> ClusterSnapshot:
        """Read the pod and all parts. A part that cannot be read is named in `unread`.

        Nodes come before the pods: the owner of a lock that is not among the pods was deleted.

        Raises:
            ApiNotFound: there is no such pod.
            ApiError: the pod cannot be read.
        """
        self._unread, self._is_silent = [], False
        pod = await self._pod(namespace, name)
        taken = self._clock.now()
        labels = frozenset(_selected_labels(pod))
        nodes = await self._part(
            "nodes",
            path_of("nodes"),
            lambda raw: codec.decode_cluster_node(raw, labels),
        )
        holders = await self._holders(nodes)
        quotas = await self._part(
            "resourcequotas",
            path_of("namespaces", namespace, "resourcequotas"),
            codec.decode_quota,
        )
        selector = f"involvedObject.uid={pod['metadata'].get('uid', '')}"
        events = await self._part(
            "events",
            path_of("namespaces", namespace, "events"),
            codec.decode_pod_event,
            (("fieldSelector", selector),),
        )
        agents: tuple[AgentPod, ...] = ()
        if any(_is_unregistered(node) for node in nodes):
            query = (("labelSelector", AGENTS),)
            pods = await self._part("pods", path_of("pods"), codec.decode_agent, query, "agents")
            agents = tuple(pod for pod in pods if pod is not None)
        unread = tuple(self._unread)
        return ClusterSnapshot(pod, taken, nodes, holders, quotas, events, unread, agents)

    async def refused(self, namespace: str) -> tuple[RefusedPod, ...]:
        """List the pods that kubelets refused; `namespace` empty: of all namespaces.

        Raises ApiError.
        """
        path = path_of("namespaces", namespace, "pods") if namespace else path_of("pods")
        query = (("fieldSelector", "status.phase=Failed"),)
        request = ApiRequest("list", "pods", path, query=query)
        try:
            found = await self._list(request, codec.decode_refused)
        except ApiForbidden as error:
            raise ApiForbidden(_right(request, error), status=error.status) from error
        return tuple(pod for pod in found if pod is not None)

    async def similar(self, namespace: str, name: str) -> NoSuchPod:
        """Find the names that may have been meant."""
        request = ApiRequest(
            "list", "pods", path_of("namespaces", namespace, "pods"), accept=METADATA_LIST
        )
        named = ApiRequest(
            "list",
            "pods",
            path_of("pods"),
            query=(("fieldSelector", f"metadata.name={name}"),),
            accept=METADATA_LIST,
        )
        try:
            known = [other for _, other in await self._list(request, codec.decode_name)]
            same = await self._list(named, codec.decode_name)
            nearest = difflib.get_close_matches(name, known, n=NEAREST, cutoff=0.5)
            if not (nearest or same):
                nearest = await self._near_holders(name)
        except ApiForbidden as error:
            return NoSuchPod(unread=_right(request, error))
        except EndlessList:
            raise  # nor is it to be believed that there is no such pod
        except ApiError as error:
            return NoSuchPod(unread=str(error))
        return NoSuchPod(tuple(nearest), tuple(sorted(space for space, _ in same))[:NEAREST])

    async def _near_holders(self, name: str) -> list[str]:
        """Similar names of pods with GPUs in all namespaces, with their namespace."""
        query = (("labelSelector", annotations.VGPU_NODE),)
        request = ApiRequest("list", "pods", path_of("pods"), query=query, accept=METADATA_LIST)
        spaces = {other: space for space, other in await self._list(request, codec.decode_name)}
        near = difflib.get_close_matches(name, spaces, n=NEAREST, cutoff=0.6)
        return [f"{spaces[other]}/{other}" for other in near]

    async def _pod(self, namespace: str, name: str) -> JsonObject:
        path = path_of("namespaces", namespace, "pods", name)
        request = ApiRequest("get", "pods", path)
        try:
            return codec.decode_target(await self._session.call(request))
        except ApiForbidden as error:
            raise ApiForbidden(_right(request, error), status=error.status) from error
        except MalformedText as error:
            raise ApiError(f"{request.what}: {error}") from error

    async def _holders(self, nodes: tuple[ClusterNode, ...]) -> tuple[GpuHolder, ...]:
        """The pods with GPUs. Schedulers from 2.5 on label them; 2.4 only annotates them."""
        reports = (node.annotations.get(annotations.REGISTER, "") for node in nodes)
        is_labelled = all(report.startswith(JSON_FORM) for report in reports if report)
        query = (
            ("labelSelector", annotations.VGPU_NODE)
            if is_labelled
            else ("fieldSelector", UNFINISHED)
        )
        found = await self._part("pods", path_of("pods"), codec.decode_holder, (query,))
        return tuple(holder for holder in found if holder is not None)

    async def _part(
        self,
        resource: str,
        path: str,
        read: Callable[[Raw], T],
        query: tuple[tuple[str, str], ...] = (),
        part: str = "",
    ) -> tuple[T, ...]:
        """List a part, which is named by its resource unless `part` does."""
        request = ApiRequest("list", resource, path, query=query)
        if self._is_silent:
            self._unread.append(
                Unread(part or resource, "not asked, because the API server fell silent")
            )
            return ()
        try:
            return await self._list(request, read)
        except ApiForbidden as error:
            self._unread.append(Unread(part or resource, _right(request, error)))
        except EndlessList:
            raise  # no other part of what this server says is to be believed
        except ApiError as error:
            self._unread.append(Unread(part or resource, str(error)))
            self._is_silent = not error.status
        return ()

    async def _list(self, request: ApiRequest, read: Callable[[Raw], T]) -> tuple[T, ...]:
        lists = Lists(self._session, whole=False, budget=lambda: self._budget)
        return (await lists.fetch(request, read)).items


def _is_unregistered(node: ClusterNode) -> bool:
    """Whether a Node that has, or had, GPUs reports none or offers none."""
    has_report = bool(node.annotations.get(annotations.REGISTER))
    has_gpus = node.slices > 0 or has_report or annotations.HANDSHAKE in node.annotations
    return has_gpus and not (has_report and node.slices > 0)


def _right(request: ApiRequest, error: ApiError) -> str:
    """The missing right in one sentence."""
    if error.status == 401:
        return f"{request.what}: the API server does not accept the credentials; renew them"
    scope = "in this namespace" if "/namespaces/" in request.path else "in the whole cluster"
    return (
        f"this account may not {request.verb} {request.resource} {scope}; grant it the verb "
        f"{request.verb} on the resource {request.resource}"
    )


def _selected_labels(pod: JsonObject) -> Iterable[str]:
    """The labels of Nodes that the pod's own rules name."""
    spec = pod["spec"]
    yield from spec.get("nodeSelector") or ()
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    for term in required.get("nodeSelectorTerms") or ():
        for rule in term.get("matchExpressions") or ():
            yield str(rule.get("key", ""))
