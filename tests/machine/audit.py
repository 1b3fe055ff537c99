"""What must hold whatever happens: each answer, each write of the agent, held against the truth.

The truth is what the scheduler decided, what the kubelet asked for and what runs on the node.
A breach is noted and told after the step in which it happened.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from agent.cluster import (
    ALLOCATED,
    BIND_PHASE,
    BIND_TIME,
    MUTEX_LOCK,
    PHASE_FAILED,
    PHASE_SUCCESS,
    PodUid,
)
from agent.hami.annotations import decode_pod_devices, decode_stamp
from agent.kubelet.door import container_response
from agent.ledger import ContainerKey
from agent.model import Share
from agent.sandbox.kubelet.pods import ContainerKey as Owner
from agent.sandbox.kubelet.pods import KubeletEvent
from agent.sandbox.store import Json
from agent.state import CURRENT, decode_state
from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.builders import a_uuid
from tests.fakes.disk import MemoryDisk
from tests.fakes.kubelet_side import FakeHookDirs
from tests.machine.api import Store
from tests.machine.kubelet import RESOURCE, MemoryKubelet
from tests.machine.pods import GPU_MIB, Amount, MachineRoom, Scheduler

HEARD_BY_A_GHOST = "a deleted pod heard the answer of another pod"

ALL = 100
"""Percent of the cores: 0 is no limit."""

UNPLACED = "a rejected pod that no scheduler bound got what its author wrote"
HEARD_BY_A_STATIC_POD = "a static pod heard the answer of a dead container"


class Audit:
    """Keeps the truth and the breaches. `answers`: what each container was given, as bytes.

    `excuses`: how often something was let pass that nobody could know, by kind. `mistaken`: pods
    that heard another one's answer.
    """

    def __init__(
        self, store: Store, kubelet: MemoryKubelet, scheduler: Scheduler, disk: MemoryDisk
    ) -> None:
        self.breaches: list[str] = []
        self.answers: dict[Owner, bytes] = {}
        self.mistaken: set[str] = set()
        self.excuses: Counter[str] = Counter()
        self._rejected: set[str] = set()
        self.answered_calls = 0
        self.room = MachineRoom(kubelet, scheduler, self.pod)
        self._takers: defaultdict[str, list[str]] = defaultdict(list)
        self._bound: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._names: dict[str, str] = {}
        self._pods: dict[str, Json] = {}
        """What the store holds, by UID: a search took half of a history's time."""
        self._asked_containers: dict[str, list[str]] = {}
        self._asking: Owner = ("", "")
        self._asked: Owner = ("", "")
        self._crossed: dict[Owner, bool] = {}
        """Of calls under way: whether the kubelet has asked the agent for another one since."""
        self._could_know = False
        self._store = store
        self._kubelet = kubelet
        self._scheduler = scheduler
        self._disk = disk
        store.told = self._told
        kubelet.history.listen(self._hear)

    def begins(self) -> Callable[[], None]:
        """A call begins. The result says that the next answer is its: calls overlap."""
        owner = self._asked

        def is_answered() -> None:
            self._asking = owner

        return is_answered

    def answered(self, response: ContainerAllocateResponse) -> None:
        """The agent has just answered the container that the kubelet asks for."""
        self.answered_calls += 1
        owner, raw = self._asking, bytes(response)
        given = owner_in(response)
        if given != owner and not self.was_there(owner[0]):
            # It asks before the API server hears of it, so no LIST can tell it from a pod whose
            # dead container waits.
            self.excuses[HEARD_BY_A_STATIC_POD] += owner[0] not in self.mistaken
            self.mistaken.add(owner[0])
            return
        if given != owner and self._is_heard_by_a_ghost(owner[0], given[0]):
            self.mistaken.add(owner[0])
            owner = given
        if self.answers.setdefault(owner, raw) != raw:
            self._breach("a container got another answer than before", owner)
        self._check_place(owner, response)
        self._check_share(owner, response)
        self._check_disk(owner, raw)
        self._check_sums(owner)

    def released(self, value: str) -> None:
        """The agent removes a lock."""
        owners = tuple(self._may_be_of(value))
        was_gone = not owners and value.partition(",")[2] in self._names.values()
        if not was_gone and not any(map(self._needs_no_lock, owners)):
            self._breach("a lock was taken from a pod that needs it", value)

    def annotated(self, uid: PodUid, annotations: Mapping[str, str | None]) -> None:
        """The agent writes on a pod."""
        phase = annotations.get(BIND_PHASE)
        if phase == PHASE_FAILED and not self._is_refused(uid):
            self._breach("a pod that was not refused was settled as failed", uid)
        if phase == PHASE_SUCCESS and not self.is_served(uid):
            self._breach("a pod that was not answered in full was settled as a success", uid)

    def touched(self, name: str) -> None:
        """A container's directory is wiped or removed."""
        uid, _, container = name.partition("_")
        pod = self._kubelet.node.pods.get(uid)
        if pod is not None and container in pod.running:
            self._breach("the directory of a running container was emptied", name)

    def pod(self, uid: str) -> Json | None:
        """The pod at the API server."""
        return self._pods.get(uid)

    def was_there(self, uid: str) -> bool:
        """Whether the API server ever had the pod."""
        return uid in self._names

    def is_live(self, uid: str) -> bool:
        """Whether a pod counts."""
        return self.room.is_live(uid)

    def _hear(self, event: KubeletEvent) -> None:
        owner = event.pod, event.container
        if event.kind in {"preferring", "allocating"}:
            before = event.kind == "allocating" and self._crossed.get(owner, False)
            self._crossed = {**dict.fromkeys(self._crossed, True), owner: before}
        elif event.kind in {"allocated", "allocate_refused"}:
            was_crossed = self._crossed.pop(owner, False)
            self._could_know |= was_crossed and event.kind == "allocated"
        elif event.kind == "started":
            self._crossed, self._could_know = {}, False
        if event.kind == "allocating":
            self._asked = owner
        elif event.kind == "rejected":
            self._rejected.add(event.pod)
        elif event.kind == "panicked":
            if self._could_know:
                self._breach("the kubelet panicked", event.text)
            else:
                self.excuses["a panic: another container began after the answer, or unheard"] += 1

    def _is_heard_by_a_ghost(self, uid: str, heir: str) -> bool:
        """Whether a pod that is gone from the API server heard the answer of another one.

        The kubelet still admits it. Nothing that the agent can ask tells it from the next pod of
        its name; and one that was answered before the kubelet lost its records would cost others
        an answer if it counted. It ends at once, and the other one hears the same again.
        """
        is_heir = self._names.get(uid) == self._names.get(heir)
        was_answered = any(owner == uid for owner, _ in self.answers)
        if self.pod(uid) is not None or not (is_heir or was_answered):
            return False
        self.excuses[HEARD_BY_A_GHOST] += 1
        return True

    def _told(self, resource: str, before: Json | None, after: Json | None) -> None:
        """A write to the store: whose lock is it that stands on the Node now?"""
        if resource == "pods" and before is not None:
            self._pods.pop(before["metadata"]["uid"], None)
        if resource == "pods" and after is not None:
            self._pods[after["metadata"]["uid"]] = after
            self._names[after["metadata"]["uid"]] = key_of(after)
            self._asked_containers[after["metadata"]["uid"]] = asked_containers(after)
            noted = (after["metadata"].get("annotations") or {}).get(BIND_TIME)
            if noted is not None:
                self._bound[key_of(after)][after["metadata"]["uid"]] = int(noted)
        if resource != "nodes" or after is None or lock_of(before) == lock_of(after):
            return
        for pod in self._store.select("pods"):
            if lock_of(after).endswith(f",{key_of(pod)}"):
                self._takers[lock_of(after)].append(pod["metadata"]["uid"])

    def _may_be_of(self, value: str) -> Iterator[str]:
        """Who took the lock, and earlier pods of that name that were bound in the same second.

        Nobody where the scheduler took it, late in its queue, for a pod that was gone by then.
        """
        yield from self._takers[value]
        stamp, _, key = value.partition(",")
        for uid, bound in self._bound[key].items():
            if decode_stamp(stamp).timestamp() <= bound:
                yield uid

    def _needs_no_lock(self, uid: str) -> bool:
        pod = self.pod(uid)
        is_over = pod is None or pod["status"].get("phase") in ("Succeeded", "Failed")
        if is_over or self.is_served(uid) or self._is_refused(uid):
            return True
        if self._is_started(uid):
            self.excuses["the lock of a pod that the kubelet started or rejected unasked"] += 1
            return True
        if uid in self._scheduler.unbound:
            self.excuses["the lock of a pod whose bind had failed"] += 1
            return True
        return False

    def _is_started(self, uid: str) -> bool:
        """Whether a kubelet without its records started it without asking, or rejected it."""
        pod, node = self.pod(uid), self._kubelet.node.pods.get(uid)
        if node is not None and node.is_rejected:
            return True
        apps = (pod or {"spec": {"containers": ()}})["spec"]["containers"]
        starts = node.starts if node is not None else {}
        return bool(apps) and all(one["name"] in starts for one in apps)

    def _is_binding_hidden(self, uid: str) -> bool:
        """Whether HAMi's scheduler did not place the pod, and its status no longer says so.

        A kubelet rejected it, which takes from the status who bound it, and died.
        """
        status = (self.pod(uid) or {"status": {}})["status"]
        types = {one["type"] for one in status.get("conditions") or ()}
        is_hidden = "startTime" in status and "PodScheduled" not in types
        return is_hidden and uid not in self._scheduler.placed

    def _is_refused(self, uid: str) -> bool:
        node = self._kubelet.node.pods.get(uid)
        admission = node.admission if node else None
        if admission is not None and "[HA-" in admission.message:
            return True
        pod = self.pod(uid)  # the kubelet has let it go, and its status stays
        return pod is not None and "[HA-" in pod["status"].get("message", "")

    def is_served(self, uid: str) -> bool:
        """Whether every container that the kubelet can ask for was answered."""
        pod = self.pod(uid)
        if pod is None:
            return True
        wanted = asked_containers(pod)
        answered = {name for name in wanted if (uid, name) in self.answers}
        # One that ran and ended while the kubelet knew no plugin is not asked for any more.
        answered |= {
            one["name"]
            for one in pod.get("status", {}).get("initContainerStatuses", ())
            if "terminated" in one.get("state", {})
        }
        content = self._disk.files._on_disk.get(CURRENT)
        if content is not None and content.synced is not None:  # killed between disk and answer
            rows = decode_state(content.synced).ledger.rows_of(PodUid(uid))
            answered |= {row.key.container for row in rows}
        return bool(wanted) and answered >= set(wanted)

    def _check_place(self, owner: Owner, response: ContainerAllocateResponse) -> None:
        if owner_in(response) != owner:
            self._breach("a container was given another one's directory", owner)

    def _check_share(self, owner: Owner, response: ContainerAllocateResponse) -> None:
        """No other GPU and no more of it than the scheduler decided for this very container."""
        placed, given = self._decided(owner), _given(response)
        self.room.granted[owner[0]][owner[1]] = given
        if self._is_binding_hidden(owner[0]) and given == self._asked_by_its_author(owner):
            self.excuses[UNPLACED] += 1
            return
        if placed.keys() != given.keys():
            self._breach("a container was given GPUs that are not its own", owner, placed, given)
        elif any(amount[0] > placed[gpu][0] for gpu, amount in given.items()):
            self._breach("a container was given more than its share", owner, placed, given)
        elif given and (given[min(given)][1] or ALL) > (placed[min(placed)][1] or ALL):
            self._breach("a container was given more compute than its share", owner)

    def _decided(self, owner: Owner) -> Mapping[str, Amount]:
        """What the scheduler gave the container: its groups without those of other containers."""
        return self._share_of(owner, self._scheduler.placed.get(owner[0], ()))

    def _asked_by_its_author(self, owner: Owner) -> Mapping[str, Amount]:
        """What the pod's annotation gives the container."""
        pod = self.pod(owner[0]) or {"metadata": {"annotations": {}}}
        text = (pod["metadata"].get("annotations") or {}).get(ALLOCATED, "")
        return self._share_of(owner, decode_pod_devices(text))

    def _share_of(self, owner: Owner, every: Sequence[Sequence[Share]]) -> Mapping[str, Amount]:
        uid, name = owner
        groups = [group for group in every if group]
        node = self._kubelet.node.pods.get(uid)
        if node is not None:
            asking = [one.name for one in node.spec.containers if one.limits.get(RESOURCE)]
        else:
            asking = self._asked_containers.get(uid, [])
        if name not in asking or asking.index(name) >= len(groups):
            return {}
        shares = groups[asking.index(name)]
        return {str(one.uuid): (one.memory_mib or GPU_MIB, one.core_percent) for one in shares}

    def _check_disk(self, owner: Owner, raw: bytes) -> None:
        """If the power failed now, the row would be there."""
        content = self._disk.files._on_disk.get(CURRENT)
        if content is None or content.synced is None:
            self._breach("an answer was given before anything was on disk", owner)
            return
        row = decode_state(content.synced).ledger.find(ContainerKey(PodUid(owner[0]), owner[1]))
        if row is None or bytes(container_response(row.edits)) != raw:
            self._breach("an answer was given before its row was on disk", owner)

    def _check_sums(self, owner: Owner) -> None:
        """All that live pods were given.

        A pod that a kubelet rejected holds nothing. A tenant's lie can sell its room before the
        next kubelet, which was not told, asks for it again.
        """
        for gpu in self.room.granted[owner[0]][owner[1]]:
            excess = self.room.excess(owner[0], gpu)
            if excess and owner[0] in self._rejected:
                self.excuses["a rejected pod came back to room that a tenant's lie had sold"] += 1
            elif excess:
                self._breach("a GPU was promised beyond what it has", gpu, excess)

    def _breach(self, what: str, *about: object) -> None:
        self.breaches.append(": ".join((what, *map(str, about))))


class AuditedHooks(FakeHookDirs):
    """Host directories that belong to somebody."""

    audit: Audit

    async def prepare(self, name: str, *, wipe: bool) -> None:
        if wipe:
            self.audit.touched(name)
        await super().prepare(name, wipe=wipe)

    async def remove(self, name: str) -> None:
        self.audit.touched(name)
        await super().remove(name)


def lock_of(node: Json | None) -> str:
    """The text of the lock on the Node, or nothing."""
    text: str = ((node or {"metadata": {}})["metadata"].get("annotations") or {}).get(
        MUTEX_LOCK, ""
    )
    return text


def key_of(pod: Json) -> str:
    """Namespace and name, as the lock has them."""
    return f"{pod['metadata']['namespace']},{pod['metadata']['name']}"


def uid_of(pod: Json) -> str:
    return str(pod["metadata"]["uid"])


def asked_containers(pod: Json) -> list[str]:
    """The containers for which the kubelet asks, in its order."""
    return [one["name"] for one in _containers(pod) if _count(one)]


def _containers(pod: Json) -> Iterator[Json]:
    yield from pod["spec"].get("initContainers") or ()
    yield from pod["spec"]["containers"]


def _count(container: Json) -> int:
    return int(((container.get("resources") or {}).get("limits") or {}).get(RESOURCE, 0))


def owner_in(response: ContainerAllocateResponse) -> Owner:
    """Whose directory the container is given."""
    names = (mount.host_path.rpartition("/containers/")[2] for mount in response.mounts)
    uid, _, container = next(name for name in names if "_" in name).partition("_")
    return uid, container


def _given(response: ContainerAllocateResponse) -> dict[str, Amount]:
    """MiB by GPU as the container's environment says it; compute is the first GPU's."""
    gpus = response.envs.get("NVIDIA_VISIBLE_DEVICES", "").split(",")
    cores = int(response.envs.get("CUDA_DEVICE_SM_LIMIT", "100"))
    limits = (
        response.envs.get(f"CUDA_DEVICE_MEMORY_LIMIT_{n}", f"{GPU_MIB}m") for n in range(len(gpus))
    )
    return {gpu: (int(text[:-1]), cores) for gpu, text in zip(gpus, limits, strict=True)}


GPUS = tuple(str(a_uuid(n)) for n in range(2))
"""The GPUs of the node, in PCI order, which is the order of their names."""
