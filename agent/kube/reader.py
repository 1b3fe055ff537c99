"""Reads a cluster for the commands: nodes, pods and rights."""

import contextlib
import datetime as dt
import difflib
import email.utils
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
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
from agent.errors import ApiError, ApiNotFound, MalformedText, cap
from agent.hami.annotations import decode_node_lock, is_json_form, read_register
from agent.kube.client import (
    LIST_LIMIT_OF_COMMANDS,
    MOST,
    WRITER,
    ApiRequest,
    KubeSession,
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
    annotation_writes,
    decode_moment,
    decode_node,
    decode_pod,
    decode_quantity,
    other_writer,
)
from agent.node import NodeSight, Right, skew_of
from agent.ports import Clock

# The part of a cluster that explains one pod: the pod, the nodes, who holds GPUs, quotas, Events.

JsonObject = Mapping[str, Any]
PLUGINS: Final = ("hami-device-plugin", "nvidia-device-plugin")
"""Names or components of pods of other plugins for NVIDIA GPUs contain one of these."""
GENERATED: Final = {"Deployment": "ReplicaSet", "CronJob": "Job"}
"""What a workload makes that makes its pods."""


class Taint(msgspec.Struct, frozen=True):
    """A taint of a Node."""

    key: str
    value: str
    effect: str


class ClusterNode(msgspec.Struct, frozen=True):
    """A Node as the schedulers see it.

    - `annotations`: those of HAMi.
    - `slices`: the allocatable slices that its kubelet offers.
    - `reported`: when register annotation, cordon or handshake were last written; None if it is not
      known.
    """

    name: str
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    is_closed: bool = False
    slices: int = 0
    reported: dt.datetime | None = None


class PodEventView(msgspec.Struct, frozen=True):
    """An Event. `last`: the last time; None if it cannot be read. `about`: its object's name."""

    kind: str
    reason: str
    message: str
    writer: str
    last: dt.datetime | None
    about: str = ""


class ListedPod(msgspec.Struct, frozen=True):
    """A pod of a list, with what commands say of it.

    - `at`: when the kubelet saw it, else when it was created; None if neither can be read.
    - `owners`: kind and name of each.
    - `state`: `Ready`, else what it waits for in the kubelet's words.
    - `is_plugin`: it mounts the kubelet's plugin directory of its host.
    - `component`: its label of this name.
    - `chosen`: the Node that HAMi's scheduler chose; empty: it has chosen no GPUs.
    - `shares`: its devices annotation.
    - `inits`: how many init containers it has; `has_passed_init`: all have ended well.
    """

    namespace: str
    name: str
    node: str = ""
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    at: dt.datetime | None = None
    is_deleted: bool = False
    owners: tuple[tuple[str, str], ...] = ()
    state: str = ""
    is_plugin: bool = False
    component: str = ""
    uid: str = ""
    chosen: str = ""
    shares: str = ""
    inits: int = 0
    has_passed_init: bool = False

    @property
    def is_other_plugin(self) -> bool:
        """Whether it is another plugin for NVIDIA GPUs, by its name or component."""
        return any(plugin in word for plugin in PLUGINS for word in (self.name, self.component))

    @property
    def rank(self) -> int:
        """0 without a Node, 1 on one and not running, 2 running, 3 ended well or being deleted."""
        if self.is_deleted or self.phase == "Succeeded":
            return 3
        return 2 if self.phase == "Running" else int(bool(self.node))

    def is_of(self, kind: str, name: str) -> bool:
        """Whether this workload owns it, or what this workload makes."""
        return any(
            (owner_kind, owner) == (kind, name)
            # The name of what a workload makes has one more word, without a hyphen.
            or (owner_kind == GENERATED.get(kind) and owner.rpartition("-")[0] == name)
            for owner_kind, owner in self.owners
        )


class HeldUse(msgspec.Struct, frozen=True):
    """What a container of the pod uses of one GPU, as the agent of its node says.

    `used_mib` and `last_kernel` are None if they are not known.
    """

    container: str
    uuid: str
    used_mib: int | None
    last_kernel: dt.datetime | None


class ClusterSnapshot(msgspec.Struct, frozen=True):
    """All parts as they were read, in this order: nodes, holders, quotas, Events.

    `unread` says why a part could not be read; the part is empty then. `taken`: when the pod was
    read. `agents`: those pods of agents that were asked for; none for agents that are no pods.
    `uses`: of a running pod; `use_unread`: why its node's agent did not say.

    `node_events`: what agents say of the pod's Node, or of all if one does not offer all its GPUs.
    `owners`: the phase of each pod that holds a node lock and no GPU; empty if it does not exist.
    `is_own_read`: the pods of the pod's namespace were read, if not those of the cluster.
    """

    pod: JsonObject
    taken: dt.datetime
    nodes: tuple[ClusterNode, ...] = ()
    holders: tuple[ListedPod, ...] = ()
    quotas: tuple[JsonObject, ...] = ()
    events: tuple[PodEventView, ...] = ()
    unread: Mapping[str, str] = msgspec.field(default_factory=dict)
    agents: tuple[ListedPod, ...] = ()
    uses: tuple[HeldUse, ...] = ()
    use_unread: str = ""
    node_events: tuple[PodEventView, ...] = ()
    owners: Mapping[tuple[str, str], str] = msgspec.field(default_factory=dict)
    is_own_read: bool = True

    def has(self, part: str) -> bool:
        """Whether this part (nodes, pods, resourcequotas, events, agents) was read."""
        return part not in self.unread


# Decodes what commands read of a cluster; each object is cut to what a decision uses.

REFUSED: Final = "UnexpectedAdmissionError"
"""The reason of a pod that the kubelet failed because of its devices."""
SLICES: Final = "nvidia.com/gpu"
_NOTED: Final = (REGISTER, SCORE, HANDSHAKE, MUTEX_LOCK, CORDON)
_REPORT: Final = frozenset({REGISTER, CORDON, HANDSHAKE})
"""A removed cordon leaves no trace, but the scheduler writes the handshake when it reads on."""


def decode_parts(found: JsonObject) -> dict[str, dict[str, Any]]:
    """An object's metadata, spec and status; a part that it lacks is empty."""
    return {part: dict(inside(found, part)) for part in ("metadata", "spec", "status")}


def decode_cluster_node(node: JsonObject) -> ClusterNode:
    """Decode a Node."""
    notes = texts_in(node, "metadata", "annotations")
    writes = annotation_writes(inside(node, "metadata"))
    stamps = (decode_moment(time) for key, _, time in writes if key in _REPORT)

    return ClusterNode(
        name=text_in(node, "metadata", "name"),
        annotations={key: text for key, text in notes.items() if key in _NOTED},
        labels=texts_in(node, "metadata", "labels"),
        taints=tuple(
            Taint(*(text_in(taint, part) for part in ("key", "value", "effect")))
            for taint in objects_in(node, "spec", "taints")
        ),
        is_closed=inside(node, "spec").get("unschedulable") is True,
        slices=decode_quantity(text_in(node, "status", "allocatable", SLICES)) or 0,
        reported=max(filter(None, stamps), default=None),
    )


def decode_quota(quota: JsonObject) -> JsonObject:
    """Decode a ResourceQuota: its names and limits."""
    names = {key: text_in(quota, "metadata", key) for key in ("namespace", "name")}
    return {"metadata": names, "spec": {"hard": inside(quota, "spec", "hard")}}


def decode_pod_event(event: JsonObject) -> PodEventView:
    """Decode an Event."""
    stamps = (
        text_in(event, "series", "lastObservedTime"),
        text_in(event, "lastTimestamp"),
        text_in(event, "eventTime"),
        text_in(event, "metadata", "creationTimestamp"),
    )

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
    waits = (
        text_in(one, "state", "waiting", "reason")
        for one in (*inits, *objects_in(status, "containerStatuses"))
    )
    is_ready = any(
        entry.get("type") == "Ready" and entry.get("status") == "True"
        for entry in objects_in(status, "conditions")
    )
    phase = text_in(status, "phase") or "Pending"
    not_ready = "Running, not ready" if phase == "Running" else phase
    # Labels and owners are the words of a pod's author. A pod that may mount the kubelet's plugin
    # directory may replace the device plugin of its node anyway.
    paths = (text_in(volume, "hostPath", "path") for volume in objects_in(spec, "volumes"))

    return ListedPod(
        namespace=text_in(metadata, "namespace"),
        name=text_in(metadata, "name"),
        node=text_in(spec, "nodeName"),
        phase=phase,
        reason=text_in(status, "reason"),
        message=text_in(status, "message"),
        at=decode_moment(status.get("startTime"))
        or decode_moment(metadata.get("creationTimestamp")),
        is_deleted=bool(metadata.get("deletionTimestamp")),
        owners=tuple(
            (text_in(owner, "kind"), text_in(owner, "name"))
            for owner in objects_in(metadata, "ownerReferences")
        ),
        state="Ready" if is_ready else next(filter(None, waits), not_ready),
        is_plugin=any(PurePosixPath(path).name == "device-plugins" for path in paths),
        component=text_in(metadata, "labels", "app.kubernetes.io/component"),
        uid=text_in(metadata, "uid"),
        chosen=text_in(metadata, "annotations", VGPU_NODE),
        shares=text_in(metadata, "annotations", ALLOCATED),
        inits=len(objects_in(spec, "initContainers")),
        has_passed_init=bool(codes) and all(code == 0 for code in codes),
    )


def decode_name(found: JsonObject) -> tuple[str, str]:
    """Namespace and name of an object."""
    return text_in(found, "metadata", "namespace"), text_in(found, "metadata", "name")


# Reads one pod and the parts of the cluster that decide about it.

METADATA_LIST: Final = (
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
)
NEAREST: Final = 3
AGENTS: Final = "app.kubernetes.io/name=hami-agent"
"""The label of the agents' pods in chart and manifests."""
OF_NODE: Final = "spec.nodeName="
UNFINISHED: Final = "status.phase!=Succeeded,status.phase!=Failed"
OWNERS: Final = 16
"""Owners of locks that are looked up. A lock stands for seconds, so there are few."""

T = TypeVar("T")


class ObjectReader:
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
        accept: str = "application/json",
    ) -> tuple[T, ...]:
        """What `read` makes of the objects; `namespace` empty: of the whole cluster.

        `labels`, `fields`: selectors. Raises ApiError.
        """
        path = path_of("namespaces", namespace, resource) if namespace else path_of(resource)
        request = ApiRequest("list", resource, path, accept=accept)
        _, items = await fetch_list(
            self._session,
            request.asking(labelSelector=labels, fieldSelector=fields),
            lambda item: read(read_object(item)),
            # The server answers for the pods of one node from its cache if it is asked for all.
            0 if fields.startswith(OF_NODE) else MOST,
            LIST_LIMIT_OF_COMMANDS,
        )
        return tuple(items)

    async def pod(self, namespace: str, name: str) -> dict[str, dict[str, Any]]:
        """Get one pod with its metadata, spec and status. Raises ApiNotFound, ApiError."""
        path = path_of("namespaces", namespace, "pods", name)
        return decode_parts(await self._session.fetch(ApiRequest("get", "pods", path), read_object))

    async def node_object(self, name: str) -> JsonObject:
        """Get one Node with spec and status. Raises ApiNotFound, ApiError."""
        return await self._session.fetch(
            ApiRequest("get", "nodes", path_of("nodes", name)), read_object
        )


class ClusterReader(ObjectReader):
    """Reads what decides about a pod, the pods of a workload and those that were refused."""

    def __init__(self, session: KubeSession, clock: Clock) -> None:
        super().__init__(session)
        self._clock = clock
        self._unread: dict[str, str] = {}
        self._is_silent = False
        """It gave no answer: each further request would only wait for its deadline."""

    async def snapshot(self, namespace: str, name: str) -> ClusterSnapshot:
        """Read the pod and all parts. A part that cannot be read is named in `unread`.

        Nodes come before the pods: the owner of a lock that is not among the pods was deleted.

        Raises:
            ApiNotFound: there is no such pod.
            ApiError: the pod cannot be read.
        """
        pod = await self.pod(namespace, name)
        taken = self._clock.now()

        nodes = await self._part("nodes", decode_cluster_node)

        # Schedulers from 2.5 on label the pods with GPUs; 2.4 only annotates them.
        reports = (node.annotations.get(REGISTER, "") for node in nodes)
        is_labelled = all(map(is_json_form, filter(None, reports)))
        labels, fields = (VGPU_NODE, "") if is_labelled else ("", UNFINISHED)
        pods = partial(self._part, "pods", decode_listed, labels=labels, fields=fields)
        holders = await pods()
        if "pods" in self._unread:
            # Whoever may read one namespace alone can still be told what holds its quota.
            holders = await pods(namespace=namespace, part="own pods")
        is_own_read = self._unread.pop("own pods", None) is None

        quotas = await self._part("resourcequotas", decode_quota, namespace=namespace)
        about = f"involvedObject.uid={pod['metadata'].get('uid', '')}"
        events = await self._part("events", decode_pod_event, namespace=namespace, fields=about)

        agents: tuple[ListedPod, ...] = ()
        said: tuple[PodEventView, ...] = ()
        if any(map(_is_unregistered, nodes)):
            agents = await self._part("pods", decode_listed, labels=AGENTS, part="agents")
        if (bound := pod["spec"].get("nodeName")) or any(map(_is_troubled, nodes)):
            about = "involvedObject.kind=Node" + (f",involvedObject.name={bound}" if bound else "")
            said = await self._part(
                "events",
                decode_pod_event,
                part="events of Nodes",
                namespace=NODE_NAMESPACE,
                fields=about,
            )

        return ClusterSnapshot(
            pod,
            taken,
            nodes,
            tuple(holder for holder in holders if holder.chosen),
            quotas,
            events,
            agents=tuple(agent for agent in agents if agent.is_plugin),
            owners=await self._owners(nodes, holders),
            node_events=tuple(event for event in said if event.writer == WRITER),
            unread=self._unread,
            is_own_read=is_own_read,
        )

    async def _owners(
        self, nodes: Iterable[ClusterNode], holders: Iterable[ListedPod]
    ) -> Mapping[tuple[str, str], str]:
        """The phases of pods that hold a lock and no GPU yet; a pod that is unread is left out."""
        owners = set[tuple[str, str]]()
        for node in nodes:
            with contextlib.suppress(MalformedText):  # also where there is no lock
                lock = decode_node_lock(node.annotations.get(MUTEX_LOCK, ""))
                owners |= {lock.owner} if lock.owner else set()
        owners -= {(holder.namespace, holder.name) for holder in holders if holder.chosen}

        found: dict[tuple[str, str], str] = {}
        for owner in sorted(owners)[:OWNERS]:
            try:
                pod = await self.pod(*owner)
            except ApiNotFound:
                found[owner] = ""
            except ApiError:
                continue  # nothing is concluded from what could not be read
            else:
                found[owner] = text_in(pod["status"], "phase") or "Pending"
        return found

    async def owned(self, namespace: str, kind: str, name: str) -> tuple[ListedPod, ...]:
        """The pods of a workload, those that are furthest from running first. Raises ApiError."""
        pods = await self.read_list("pods", decode_listed, namespace=namespace)
        owned = (pod for pod in pods if pod.is_of(kind, name))
        return tuple(sorted(owned, key=lambda pod: (pod.rank, pod.name)))

    async def refused(self, namespace: str) -> tuple[ListedPod, ...]:
        """List the pods that kubelets refused; `namespace` empty: of all namespaces.

        Raises ApiError.
        """
        pods = await self.read_list(
            "pods", decode_listed, namespace=namespace, fields="status.phase=Failed"
        )
        return tuple(pod for pod in pods if pod.reason == REFUSED)

    async def similar(self, namespace: str, name: str) -> str:
        """The names that may have been meant, as the end of a sentence."""
        read = partial(self.read_list, "pods", decode_name, accept=METADATA_LIST)
        try:
            known = [other for _, other in await read(namespace=namespace)]
            same = sorted(await read(fields=f"metadata.name={name}"))[:NEAREST]
        except ApiError as error:
            return f"; no other name is known: {error}"

        nearest = difflib.get_close_matches(name, known, n=NEAREST, cutoff=0.5)
        elsewhere = ", ".join(cap(space, 64) for space, _ in same)
        names = ", ".join(cap(other, 256) for other in nearest)
        text = f"; one is in {elsewhere}" if same else ""
        return text + (f"; the nearest names are {names}" if nearest else "")

    async def _part(
        self, resource: str, read: Callable[[JsonObject], T], part: str = "", **selectors: str
    ) -> tuple[T, ...]:
        """List a part, which is named by its resource unless `part` does."""
        why = "not asked, because the API server fell silent"
        if not self._is_silent:
            try:
                return await self.read_list(resource, read, **selectors)
            except ApiError as error:
                why = str(error)
                self._is_silent = not error.status

        self._unread[part or resource] = why
        return ()


def _is_troubled(node: ClusterNode) -> bool:
    """Whether the Node has, or had, GPUs and does not offer all of them."""
    return _is_unregistered(node) or not all(
        gpu.healthy for gpu in read_register(node.annotations.get(REGISTER))
    )


def _is_unregistered(node: ClusterNode) -> bool:
    """Whether a Node that has, or had, GPUs reports none or offers none."""
    has_report = bool(node.annotations.get(REGISTER))
    has_gpus = node.slices > 0 or has_report or HANDSHAKE in node.annotations
    return has_gpus and not (has_report and node.slices > 0)


# Reads one node: its status from its agent or its objects, its neighbours, and our rights there.

ENDED: Final = frozenset({"Succeeded", "Failed"})
"""Phases of a pod that does not serve any more, such as an evicted one."""
REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
CONTAINER: Final = "agent"
"""The agent's container in its pod, as chart and manifests name it."""


class NodeReader(ObjectReader):
    """Reads what is known of one node with the rights of who asks."""

    async def by_agent(self, *words: str) -> tuple[bytes, str]:
        """What a verb of the agent's program says in the agent's pod, and why it failed.

        Raises ApiError: there is no such pod, or the account may not run programs in it.
        """
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

    async def status(self) -> bytes:
        """The agent's status as JSON. Raises ApiError, as by_agent() or because it says none."""
        answer, failure = await self.by_agent("status", "-o", "json")
        if failure:
            raise ApiError(failure)
        return answer

    async def node(self) -> NodeView | None:
        """The Node; None: there is no such Node. Raises ApiError."""
        return await KubeApi(self._session, self._node).get_node()

    async def degraded(self) -> str:
        """The message of the Node's condition GpuDegraded; empty: it has none. Raises ApiError."""
        found = objects_in(await self.node_object(self._node), "status", "conditions")
        texts = (text_in(one, "message") for one in found if one.get("type") == GPU_DEGRADED)
        return next(texts, "")

    async def pods(self, read: Callable[[JsonObject], T], labels: str = "") -> tuple[T, ...]:
        """The pods of the node, as `read` decodes them. `labels`: a selector. Raises ApiError."""
        return await self.read_list("pods", read, labels=labels, fields=OF_NODE + self._node)

    async def events(self) -> tuple[PodEventView, ...]:
        """The Events that agents posted about the Node. Raises ApiError."""
        events = await self.read_list(
            "events",
            decode_pod_event,
            namespace=NODE_NAMESPACE,
            fields=f"involvedObject.kind=Node,involvedObject.name={self._node}",
        )
        return tuple(event for event in events if event.writer == WRITER)

    async def granted(self, right: Right) -> bool:
        """True when this identity has the right; the right is not used. Raises ApiError."""
        resource, _, part = right.resource.partition("/")
        attributes = {
            "verb": right.verb,
            "resource": resource,
            "subresource": part,
            "name": right.name,
            "namespace": right.namespace,
            **({"fieldSelector": {"rawSelector": right.selector}} if right.selector else {}),
        }
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = await self._session.fetch(
            ApiRequest("create", "selfsubjectaccessreviews", REVIEWS, body=body), read_object
        )
        return inside(answer, "status").get("allowed") is True

    async def get_sight(self, resource: str, clock: Clock) -> NodeSight | None:
        """Get the Node; None: there is none. Raises ApiError."""
        before = clock.now()
        try:
            node = await self.node_object(self._node)
        except ApiNotFound:
            return None
        skew = None
        with contextlib.suppress(ValueError):  # no time, or none that can be read
            sent = email.utils.parsedate_to_datetime(self._session.date).astimezone(dt.UTC)
            skew = skew_of(sent, before, clock.now())
        metadata = inside(node, "metadata")
        if metadata.get("name") != self._node:
            raise ApiError(f"get nodes {self._node}: the answer has no name, or another one")

        writes = annotation_writes(metadata)
        stamps = [time for key, writer, time in writes if (key, writer) == (REGISTER, WRITER)]
        offered, had = (
            max(0, decode_quantity(str(inside(node, "status", part).get(resource, 0))) or 0)
            for part in ("allocatable", "capacity")
        )

        return NodeSight(
            name=self._node,
            labels=texts_in(metadata, "labels"),
            annotations=texts_in(metadata, "annotations"),
            allocatable=offered,
            capacity=had,
            written=decode_moment(max(stamps, default="")),
            reported_by=other_writer(writes, REGISTER),
            skew=skew,
        )


async def nodes_with_gpus(
    session: KubeSession, resource: str
) -> list[tuple[NodeView, tuple[PodView, ...]]]:
    """The Nodes that report GPUs, each with the pods that hold some. Raises ApiError."""
    reader = ObjectReader(session)
    nodes = await reader.read_list("nodes", decode_node, accept=METADATA_LIST)
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

    - `keys`: the annotations that a device plugin or an agent writes.
    - `degraded`: it has the condition GpuDegraded.
    - `has_kubelet`: its kubelet reports.
    - `served`: that kubelet offers the resource, so a device plugin serves it. The kubelet reports
      the end of a plugin up to 10 s later (nodeStatusUpdateFrequency).
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


class KubeLeftovers(ObjectReader):
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
        """List the unfinished pods of this node that request GPUs, as namespace/name.

        Raises ApiError.
        """
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

        return NodeLeftovers(
            text_in(node, "metadata", "name"),
            tuple(
                key
                for key in inside(node, "metadata", "annotations")
                if key in REPORT or key.startswith(OWN)
            ),
            degraded=GPU_DEGRADED in conditions,
            has_kubelet=has_kubelet,
            served=has_kubelet and (offered or 0) > 0,
        )
