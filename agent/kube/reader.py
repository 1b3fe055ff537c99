"""Reads a cluster for the commands: nodes, pods and rights."""

import contextlib
import datetime as dt
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Final, TypeVar

import msgspec

from agent.cluster import (
    ALLOCATED,
    CORDON,
    GPU_DEGRADED,
    HANDSHAKE,
    MUTEX_LOCK,
    REGISTER,
    SCORE,
    VGPU_NODE,
    NodeView,
    PodView,
)
from agent.errors import ApiError, ApiNotFound
from agent.hami.annotations import is_json_form, read_register
from agent.kube.client import (
    MOST,
    WRITER,
    ApiRequest,
    KubeSession,
    Raw,
    fetch_list,
    inside,
    objects_in,
    path_of,
    read_object,
    text_in,
    texts_in,
)
from agent.kube.objects import (
    NODE_NAMESPACE,
    KubeApi,
    decode_moment,
    decode_node,
    decode_pod,
    decode_quantity,
)
from agent.node import Right
from agent.ports import Clock

# The part of a cluster that explains one pod: the pod, the nodes, who holds GPUs, quotas, Events.

JsonObject = Mapping[str, Any]


class Taint(msgspec.Struct, frozen=True):
    """A taint of a Node."""

    key: str
    value: str
    effect: str


class ClusterNode(msgspec.Struct, frozen=True):
    """A Node as the schedulers see it.

    `annotations`: those of HAMi. `slices`: the allocatable ones, of `capacity`. `written`: when an
    agent last wrote the register annotation; None if it is not known.
    """

    name: str
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    is_closed: bool = False
    slices: int = 0
    capacity: int = 0
    written: dt.datetime | None = None

    def age(self, now: dt.datetime) -> float | None:
        """Seconds since an agent wrote the register annotation; None: not known."""
        return None if self.written is None else (now - self.written).total_seconds()


class PodEventView(msgspec.Struct, frozen=True):
    """An Event. `last`: the last time, if it can be read. `about`: its object's name."""

    kind: str
    reason: str
    message: str
    writer: str
    last: dt.datetime | None
    about: str = ""


class ListedPod(msgspec.Struct, frozen=True):
    """A pod of a list, with what commands say of it.

    - `is_plugin`: it mounts the kubelet's plugin directory of its host.
    - `chosen`: the Node that HAMi's scheduler chose; empty: it has chosen no GPUs. `shares`: which.
    - `inits`: how many init containers it has; `has_passed_init`: all have ended well.
    - `owner`: kind and name of the workload that made it.
    """

    namespace: str
    name: str
    node: str = ""
    phase: str = "Pending"
    is_deleted: bool = False
    is_plugin: bool = False
    uid: str = ""
    chosen: str = ""
    shares: str = ""
    inits: int = 0
    has_passed_init: bool = False
    owner: tuple[str, str] = ("", "")

    @property
    def rank(self) -> int:
        """0 without a Node, 1 on one and not running, 2 running, 3 ended well or being deleted."""
        if self.is_deleted or self.phase == "Succeeded":
            return 3
        return 2 if self.phase == "Running" else int(bool(self.node))

    def is_of(self, kind: str, name: str) -> bool:
        """Whether this workload made it, or made the ReplicaSet or Job that did."""
        # The name of what a workload makes has one more word, without a hyphen.
        made = {"Deployment": "ReplicaSet", "CronJob": "Job"}.get(kind), name
        return self.owner == (kind, name) or (
            (self.owner[0], self.owner[1].rpartition("-")[0]) == made
        )


class ClusterSnapshot(msgspec.Struct, frozen=True):
    """All parts as they were read at `taken`, in this order: nodes, holders, quotas, Events.

    `unread`: why a part could not be read; it is empty then. `node_events`: what agents say of its
    Node, or of all if one does not offer all its GPUs. `is_own_read`: the pods of its namespace at
    least were read.
    """

    pod: JsonObject
    taken: dt.datetime
    nodes: tuple[ClusterNode, ...] = ()
    holders: tuple[ListedPod, ...] = ()
    quotas: tuple[JsonObject, ...] = ()
    events: tuple[PodEventView, ...] = ()
    unread: Mapping[str, str] = msgspec.field(default_factory=dict)
    node_events: tuple[PodEventView, ...] = ()
    is_own_read: bool = True

    def has(self, part: str) -> bool:
        """Whether this part (nodes, pods, resourcequotas, events) was read."""
        return part not in self.unread


def annotation_writes(metadata: Mapping[str, object]) -> tuple[tuple[str, str, str], ...]:
    """Who changed which annotation: key, writer, and when the writer last changed something."""
    return tuple(
        (key.removeprefix("f:"), str(item.get("manager")), str(item.get("time", "")))
        for item in objects_in(metadata, "managedFields")
        for key in inside(item, "fieldsV1", "f:metadata", "f:annotations")
    )


# Decodes what commands read of a cluster; each object is cut to what a decision uses.

REFUSED: Final = "UnexpectedAdmissionError"
"""The reason of a pod that the kubelet failed because of its devices."""
SLICES: Final = "nvidia.com/gpu"
_NOTED: Final = (REGISTER, SCORE, HANDSHAKE, MUTEX_LOCK, CORDON)


def decode_cluster_node(node: JsonObject, resource: str = SLICES) -> ClusterNode:
    """Decode a Node, whose slices have that name."""
    notes = texts_in(node, "metadata", "annotations")
    writes = annotation_writes(inside(node, "metadata"))
    ours = [time for key, writer, time in writes if (key, writer) == (REGISTER, WRITER)]
    offered, had = (
        max(0, decode_quantity(str(inside(node, "status", part).get(resource, 0))) or 0)
        for part in ("allocatable", "capacity")
    )

    return ClusterNode(
        name=text_in(node, "metadata", "name"),
        annotations={key: text for key, text in notes.items() if key in _NOTED},
        labels=texts_in(node, "metadata", "labels"),
        taints=tuple(
            Taint(*(text_in(taint, part) for part in ("key", "value", "effect")))
            for taint in objects_in(node, "spec", "taints")
        ),
        is_closed=inside(node, "spec").get("unschedulable") is True,
        slices=offered,
        capacity=had,
        written=decode_moment(max(ours, default="")),
    )


def decode_quota(quota: JsonObject) -> JsonObject:
    """Cut a ResourceQuota to its names and limits."""
    names = {key: text_in(quota, "metadata", key) for key in ("namespace", "name")}
    return {"metadata": names, "spec": {"hard": inside(quota, "spec", "hard")}}


def decode_pod_event(event: JsonObject) -> PodEventView:
    """Decode an Event."""
    places = ("series", "lastObservedTime"), ("lastTimestamp",), ("eventTime",)
    stamps = [text_in(event, *keys) for keys in (*places, ("metadata", "creationTimestamp"))]

    return PodEventView(
        kind=text_in(event, "type"),
        reason=text_in(event, "reason"),
        message=text_in(event, "message"),
        writer=text_in(event, "source", "component") or text_in(event, "reportingComponent"),
        last=next(filter(None, map(decode_moment, stamps)), None),
        about=text_in(event, "involvedObject", "name"),
    )


def decode_listed(pod: JsonObject) -> ListedPod:
    """Decode a pod of a list."""
    metadata, spec, status = (inside(pod, part) for part in ("metadata", "spec", "status"))
    inits = objects_in(status, "initContainerStatuses")
    codes = [inside(init, "state", "terminated").get("exitCode") for init in inits]
    # Labels are the words of a pod's author. A pod that may mount the kubelet's plugin
    # directory may replace the device plugin of its node anyway.
    paths = (text_in(volume, "hostPath", "path") for volume in objects_in(spec, "volumes"))
    owners = [
        (text_in(owner, "kind"), text_in(owner, "name"))
        for owner in objects_in(metadata, "ownerReferences")
    ]

    return ListedPod(
        namespace=text_in(metadata, "namespace"),
        name=text_in(metadata, "name"),
        node=text_in(spec, "nodeName"),
        phase=text_in(status, "phase") or "Pending",
        is_deleted=bool(metadata.get("deletionTimestamp")),
        is_plugin=any(PurePosixPath(path).name == "device-plugins" for path in paths),
        uid=text_in(metadata, "uid"),
        chosen=text_in(metadata, "annotations", VGPU_NODE),
        shares=text_in(metadata, "annotations", ALLOCATED),
        inits=len(objects_in(spec, "initContainers")),
        has_passed_init=bool(codes) and all(code == 0 for code in codes),
        owner=owners[0] if owners else ("", ""),
    )


# Reads one pod and the parts of the cluster that decide about it.

AGENTS: Final = "app.kubernetes.io/name=hami-agent"
"""The label of the agents' pods in chart and manifests."""
OF_NODE: Final = "spec.nodeName="
UNFINISHED: Final = "status.phase!=Succeeded,status.phase!=Failed"
T = TypeVar("T")


class ClusterReader:
    """Reads objects with the rights of who asks; each answer has 10 s."""

    def __init__(self, session: KubeSession, node: str = "") -> None:
        self._session = session
        self._node = node

    async def read_list(
        self,
        resource: str,
        read: Callable[[JsonObject], T],
        *,
        namespace: str = "",
        labels: str = "",
        fields: str = "",
    ) -> tuple[T, ...]:
        """What `read` makes of the objects that the selectors find. Raises ApiError."""
        path = path_of("namespaces", namespace, resource) if namespace else path_of(resource)
        request = ApiRequest("list", resource, path)
        _, items = await fetch_list(
            self._session,
            request.asking(labelSelector=labels, fieldSelector=fields),
            lambda item: read(read_object(item)),
            # Asked for all, the server answers for the pods of one node from its cache.
            0 if fields.startswith(OF_NODE) else MOST,
        )
        return tuple(items)

    async def pod(self, namespace: str, name: str) -> dict[str, dict[str, Any]]:
        """Get one pod: metadata, spec and status. Raises ApiNotFound, ApiError."""
        path = path_of("namespaces", namespace, "pods", name)
        found = await self._session.fetch(ApiRequest("get", "pods", path), read_object)
        return {part: dict(inside(found, part)) for part in ("metadata", "spec", "status")}

    async def node_object(self, name: str) -> JsonObject:
        """Get one Node. Raises ApiNotFound, ApiError."""
        request = ApiRequest("get", "nodes", path_of("nodes", name))
        return await self._session.fetch(request, read_object)

    async def snapshot(self, namespace: str, name: str, clock: Clock) -> ClusterSnapshot:
        """Read the pod and all parts. A part that cannot be read is named in `unread`.

        Raises ApiNotFound: there is no such pod; ApiError: the pod cannot be read.
        """
        unread: dict[str, str] = {}
        is_silent = False

        async def read(
            resource: str, decode: Callable[[JsonObject], T], part: str = "", **selectors: str
        ) -> tuple[T, ...]:
            """List a part, which is named by its resource unless `part` does."""
            nonlocal is_silent
            why = "not asked, because the API server fell silent"
            if not is_silent:  # each further request would only wait for its deadline
                try:
                    return await self.read_list(resource, decode, **selectors)
                except ApiError as error:
                    why, is_silent = str(error), not error.status
            unread[part or resource] = why
            return ()

        pod, taken = await self.pod(namespace, name), clock.now()
        nodes = await read("nodes", decode_cluster_node)

        # Schedulers from 2.5 on label the pods with GPUs; 2.4 only annotates them.
        reports = (node.annotations.get(REGISTER, "") for node in nodes)
        is_labelled = all(map(is_json_form, filter(None, reports)))
        labels, fields = (VGPU_NODE, "") if is_labelled else ("", UNFINISHED)
        pods = partial(read, "pods", decode_listed, labels=labels, fields=fields)
        holders = await pods()
        if "pods" in unread:
            # Whoever may read one namespace alone can still be told what holds its quota.
            holders = await pods(namespace=namespace, part="own pods")
        is_own_read = unread.pop("own pods", None) is None

        quotas = await read("resourcequotas", decode_quota, namespace=namespace)
        about = f"involvedObject.uid={pod['metadata'].get('uid', '')}"
        events = await read("events", decode_pod_event, namespace=namespace, fields=about)

        said: tuple[PodEventView, ...] = ()
        if (bound := pod["spec"].get("nodeName")) or any(map(_is_troubled, nodes)):
            about = "involvedObject.kind=Node" + (f",involvedObject.name={bound}" if bound else "")
            of_nodes = partial(read, "events", decode_pod_event, "events of Nodes")
            said = await of_nodes(namespace=NODE_NAMESPACE, fields=about)
        said = tuple(event for event in said if event.writer == WRITER)
        holders = tuple(holder for holder in holders if holder.chosen)
        parts = nodes, holders, quotas, events, unread, said
        return ClusterSnapshot(pod, taken, *parts, is_own_read=is_own_read)


def _is_troubled(node: ClusterNode) -> bool:
    """Whether the Node has, or had, GPUs and does not offer all of them."""
    report = node.annotations.get(REGISTER)
    if not report or node.slices <= 0:
        return node.slices > 0 or bool(report) or HANDSHAKE in node.annotations
    return not all(gpu.healthy for gpu in read_register(report))


# Reads one node: its status from its agent or its objects, its neighbours, and our rights there.

ENDED: Final = frozenset({"Succeeded", "Failed"})
"""Phases of a pod that does not serve any more, such as an evicted one."""
REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
CONTAINER: Final = "agent"
"""The agent's container in its pod, as chart and manifests name it."""


class NodeReader(ClusterReader):
    """Reads what is known of one node with the rights of who asks. Methods raise ApiError."""

    async def by_agent(self, *words: str) -> bytes:
        """What a verb of the agent's program says in the agent's pod."""
        pods = await self.pods(decode_listed, AGENTS)
        alive = [pod for pod in pods if pod.is_plugin and pod.phase not in ENDED]
        if not alive:
            raise ApiError(f"no pod of the agent is on the node {self._node}")
        # During an update the old pod, which is deleted, may be listed first.
        pod = min(alive, key=lambda pod: (pod.is_deleted, pod.namespace, pod.name))
        path = path_of("namespaces", pod.namespace, "pods", pod.name, "exec")
        command = tuple(("command", word) for word in ("hami-agent", *words))
        request = ApiRequest("get", "pods/exec", path, command)
        return await self._session.execute(
            request.asking(container=CONTAINER, stdout="true", stderr="true")
        )

    async def node(self) -> tuple[NodeView, str] | None:
        """The Node, and the message of its condition GpuDegraded; None: there is no such Node."""
        with contextlib.suppress(ApiNotFound):
            request = ApiRequest("get", "nodes", path_of("nodes", self._node))
            return await self._session.fetch(request, _read_degraded)
        return None

    async def pods(self, read: Callable[[JsonObject], T], labels: str = "") -> tuple[T, ...]:
        """The pods of the node that the selector finds, as `read` decodes them."""
        return await self.read_list("pods", read, labels=labels, fields=OF_NODE + self._node)

    async def events(self) -> tuple[PodEventView, ...]:
        """The Events that agents posted about the Node."""
        about = f"involvedObject.kind=Node,involvedObject.name={self._node}"
        events = await self.read_list(
            "events", decode_pod_event, namespace=NODE_NAMESPACE, fields=about
        )
        return tuple(event for event in events if event.writer == WRITER)

    async def granted(self, right: Right) -> bool:
        """True when this identity has the right; the right is not used."""
        resource, _, part = right.resource.partition("/")
        attributes: dict[str, object] = {"verb": right.verb, "resource": resource}
        attributes |= {"subresource": part, "name": right.name, "namespace": right.namespace}
        if right.selector:
            attributes["fieldSelector"] = {"rawSelector": right.selector}
        head = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        body = {**head, "spec": {"resourceAttributes": attributes}}
        request = ApiRequest("create", "selfsubjectaccessreviews", REVIEWS, body=body)
        answer = await self._session.fetch(request, read_object)
        return inside(answer, "status").get("allowed") is True

    async def get_sight(self, resource: str) -> ClusterNode | None:
        """Get the Node; None: there is none."""
        try:
            node = await self.node_object(self._node)
        except ApiNotFound:
            return None
        if text_in(node, "metadata", "name") != self._node:
            raise ApiError(f"get nodes {self._node}: the answer has no name, or another one")
        return decode_cluster_node(node, resource)


def _read_degraded(body: Raw) -> tuple[NodeView, str]:
    node = read_object(body)
    found = objects_in(node, "status", "conditions")
    texts = (text_in(one, "message") for one in found if one.get("type") == GPU_DEGRADED)
    return decode_node(node), next(texts, "")


async def nodes_with_gpus(
    session: KubeSession, resource: str
) -> list[tuple[NodeView, tuple[PodView, ...]]]:
    """The Nodes that report GPUs, each with the pods that hold some. Raises ApiError."""
    reader = ClusterReader(session)
    nodes = await reader.read_list("nodes", decode_node)
    read = partial(decode_pod, resource=resource)
    pods = await reader.read_list("pods", read, labels=VGPU_NODE)

    held = defaultdict[str, list[PodView]](list)
    for pod in pods:
        held[pod.node].append(pod)
    return [(node, tuple(held[node.name])) for node in nodes if node.annotations.get(REGISTER)]


# Reads and removes what agents left on Nodes, for `uninstall`.

REPORT: Final = frozenset({REGISTER, SCORE, HANDSHAKE})
OWN: Final = "hami-agent/"
"""The prefix of the annotations that only agents write: those of earlier builds."""


class NodeLeftovers(msgspec.Struct, frozen=True):
    """What an agent may have left on a Node, and who is there now.

    - `keys`: the annotations that a device plugin or an agent writes. `degraded`: it has the
      condition GpuDegraded.
    - `has_kubelet`: its kubelet reports. `served`: it offers the resource, so a plugin serves it
      or did up to 10 s ago (nodeStatusUpdateFrequency).
    - `agent`: a pod of an agent that was listed there.
    """

    name: str
    keys: tuple[str, ...] = ()
    degraded: bool = False
    has_kubelet: bool = False
    served: bool = False
    agent: str = ""

    @property
    def is_touched(self) -> bool:
        """True if there is something to remove."""
        return bool(self.keys) or self.degraded

    @property
    def is_busy(self) -> bool:
        """True while an agent or a plugin would write again what is removed."""
        return self.has_kubelet and (bool(self.agent) or (self.served and self.is_touched))

    @property
    def names(self) -> tuple[str, ...]:
        """What there is to remove, for people."""
        return (*self.keys, *((f"condition {GPU_DEGRADED}",) if self.degraded else ()))


class KubeLeftovers(ClusterReader):
    """Nodes and pods of agents of one resource."""

    def __init__(self, session: KubeSession, resource: str) -> None:
        super().__init__(session)
        self._resource = resource

    async def nodes(self, namespace: str, selector: str) -> tuple[NodeLeftovers, ...]:
        """List all Nodes, with the agents' pods that this selector finds. Raises ApiError.

        A pod that is not bound yet may begin on any Node: it has an entry of its own.
        """
        pods = await self.read_list("pods", decode_listed, namespace=namespace, labels=selector)
        agents = {pod.node: pod.name for pod in pods}
        # Each Node is read at once: the text of 5,000 is 100 MB.
        nodes = await self.read_list("nodes", self._read)
        if "" in agents:
            nodes += (NodeLeftovers("no Node yet", has_kubelet=True, agent=agents[""]),)
        return tuple(
            msgspec.structs.replace(node, agent=agents.get(node.name, node.agent)) for node in nodes
        )

    async def node(self, name: str) -> NodeLeftovers:
        """Get one Node. Raises ApiNotFound, ApiError."""
        return self._read(await self.node_object(name))

    async def clean(self, node: NodeLeftovers) -> None:
        """Remove what `node` names, the report first. Raises ApiNotFound, ApiError."""
        api = KubeApi(self._session, node.name)
        if node.keys:
            await api.annotate_node(dict.fromkeys(node.keys))
        if node.degraded:
            await api.patch_condition({"type": GPU_DEGRADED, "$patch": "delete"})

    async def gpu_pods(self, node: str) -> tuple[str, ...]:
        """List the unfinished pods of this node that request GPUs. Raises ApiError."""
        read = partial(decode_pod, resource=self._resource)
        pods = await NodeReader(self._session, node).pods(read)
        return tuple(sorted(pod.title for pod in pods if pod.gpu_containers and not pod.terminal))

    def _read(self, node: JsonObject) -> NodeLeftovers:
        conditions = {
            one.get("type"): one.get("status") for one in objects_in(node, "status", "conditions")
        }
        # The kubelet writes True and False; the controller Unknown when the kubelet is silent.
        has_kubelet = conditions.get("Ready", "Unknown") != "Unknown"
        offered = decode_quantity(str(inside(node, "status", "allocatable").get(self._resource, 0)))

        keys = inside(node, "metadata", "annotations")
        return NodeLeftovers(
            text_in(node, "metadata", "name"),
            tuple(key for key in keys if key in REPORT or key.startswith(OWN)),
            degraded=GPU_DEGRADED in conditions,
            has_kubelet=has_kubelet,
            served=has_kubelet and (offered or 0) > 0,
        )
