"""Pods of the tests: named, created, running, settled, refused and gone; and what they told."""

import asyncio
import datetime as dt
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent import cluster as annotations
from agent.model import Share
from agent.sandbox.scheduler.verbs import encode_node_lock, placement_patch
from tests.peers.lab.agents import RESOURCE, Agent
from tests.peers.lab.api import Object, notes_of
from tests.peers.lab.control import NODE, NODE_PATH
from tests.peers.lab.node import BUSYBOX
from tests.peers.lab.part import until, until_answer
from tests.peers.lab.placing import HAMI_SCHEDULER
from tests.peers.lab.running import Running

# Pods to try things with: what they ask for, and what they tell of their inside.

NAMESPACE: Final = "default"
_SLEEP: Final = "trap 'exit 0' TERM; while :; do sleep 3600 & wait; done"
_TELL: Final = (
    "env >/tell/{0}.env; cat /proc/self/mountinfo >/tell/{0}.mounts; touch /tell/{0}.done"
)


def a_container(
    name: str = "main",
    *,
    gpus: int = 1,
    memory: int | None = 3000,
    cores: int | None = 10,
    script: str = _SLEEP,
    **more: object,
) -> Object:
    """A container; `memory` in MiB and `cores` in percent of each GPU, `gpus` 0 asks for none."""
    limits = {RESOURCE: str(gpus)} if gpus else {}
    if gpus and memory is not None:
        limits["nvidia.com/gpumem"] = str(memory)
    if gpus and cores is not None:
        limits["nvidia.com/gpucores"] = str(cores)
    return {
        "name": name,
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "resources": {"limits": limits},
        **more,
    }


def a_pod(name: str, *containers: Object, inits: tuple[Object, ...] = (), **spec: object) -> Object:
    """A pod for HAMi's scheduler; by default one container with one GPU."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "schedulerName": HAMI_SCHEDULER,
            "hostNetwork": True,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": list(containers) or [a_container()],
            **({"initContainers": list(inits)} if inits else {}),
            **spec,
        },
    }


def as_if_generated(pod: Object) -> Object:
    """The same pod, as if its name were a controller's: no Allocate asks the API server for it."""
    return {**pod, "metadata": {**pod["metadata"], "generateName": "one-"}}


def stray(pod: Object) -> Object:
    """The same pod with its node named by the user: no scheduler and no webhook saw it."""
    return {
        **pod,
        "metadata": {**pod["metadata"], "labels": {"hami.io/webhook": "ignore"}},
        "spec": {**pod["spec"], "nodeName": NODE, "schedulerName": "default-scheduler"},
    }


def _telling(pod: str, container: Object) -> Object:
    *start, script = container["command"]
    tell = _TELL.format(f"{pod}.{container['name']}")
    mounts = [*container.get("volumeMounts", ()), {"name": "tell", "mountPath": "/tell"}]
    return {**container, "command": [*start, f"{tell}; {script}"], "volumeMounts": mounts}


REGISTERED: Final = '"Got registration request from device plugin with resource"'
ALL_HEALTHY: Final = 'resourceName="nvidia.com/gpu" totalCount=80 healthyCount=80'
_STAMP: Final = re.compile(r"[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{6})")
PODS: Final = f"/api/v1/namespaces/{NAMESPACE}/pods"
PATIENCE: Final = 40.0
"""Seconds for what takes two or three on a quiet machine, a scheduler's second try included."""


def key(name: str) -> str:
    return f"{NAMESPACE}/{name}"


def name_of(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def phase_of(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def is_up(pod: Object) -> bool:
    """Whether a pod is Ready, or has done its work."""
    conditions = pod.get("status", {}).get("conditions") or ()
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready or phase_of(pod) == "Succeeded"


def lives(pod: Object) -> Mapping[str, str]:
    """The ids of the containers of a pod that run; one that is started again has a new id."""
    found = pod.get("status", {}).get("containerStatuses") or []
    return {one["name"]: str(one["containerID"]) for one in found if "running" in one["state"]}


def containers_of(pod: Object) -> list[Object]:
    """The containers of a pod, init containers first."""
    spec = pod["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def gpu_of(slice_id: str) -> str:
    return slice_id.rpartition("-")[0]


class WithPods(Running):
    """Pods that are created, watched and deleted, and what they tell."""

    def as_seen(self, name: str) -> Object:
        return self.pods.objects[key(name)]

    def status_of(self, name: str) -> Object:
        """The status of a pod as it is now; empty while the pod is not there."""
        status: Object = self.pods.objects.get(key(name), {}).get("status", {})
        return status

    def annotations_of(self, name: str) -> Mapping[str, str]:
        """The annotations of a pod as they are now; empty while the pod is not there."""
        return notes_of(self.pods.objects.get(key(name), {"metadata": {}}))

    def lives_of(self, names: Iterable[str]) -> dict[str, Mapping[str, str]]:
        return {name: lives(self.as_seen(name)) for name in names}

    async def create(self, *pods: Object) -> float:
        """Create pods at once; when that began, by the loop's clock. Raises groups of RefusedError.

        HAMi's scheduler knows by then what the agent tells of the node. Raises TimeoutError.
        """
        await self.nodes.until_current()
        begun = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for pod in pods:
                group.create_task(self.api.create(PODS, pod))
        return begun

    async def run(self, *pods: Object, within: float = PATIENCE) -> list[str]:
        await self.create(*pods)
        names = [name_of(pod) for pod in pods]
        await self.until_running(*names, within=within)
        return names

    async def until_running(self, *names: str, within: float = PATIENCE) -> None:
        """Return once all those pods are Ready, or have done their work."""
        objects = self.pods.objects

        def all_up() -> bool:
            present = [objects[key(name)] for name in names if key(name) in objects]
            for pod in present:
                if phase_of(pod) == "Failed":
                    raise AssertionError(f"{name_of(pod)}: {pod['status']}")
            return len(present) == len(names) and all(map(is_up, present))

        try:
            await self.pods.until(all_up, within, "pods do not run")
        except TimeoutError as error:
            waiting = (objects[key(name)] for name in names if key(name) in objects)
            told = "; ".join(
                f"{name_of(pod)} {notes_of(pod)} {pod['status']}"
                for pod in waiting
                if not is_up(pod)
            )
            raise TimeoutError(f"{error}: {told}") from None

    async def until_failed(self, name: str) -> Object:
        await self.pods.until(
            lambda: self.status_of(name).get("phase") == "Failed", PATIENCE, f"{name} runs"
        )
        return self.status_of(name)

    async def until_settled(self, *names: str, within: float = 25.0) -> None:
        """Return once all were served, by HAMi's annotations, and the node's lock is free."""

        def are_settled() -> bool:
            noted = [*map(self.annotations_of, names)]
            return all(
                notes.get(annotations.BIND_PHASE) == annotations.PHASE_SUCCESS
                and not notes.get(annotations.TO_ALLOCATE, "").strip(";")
                for notes in noted
            )

        await self.pods.until(are_settled, within, "bind-phase success and nothing left")
        await self.until_unlocked(within)

    async def delete(self, name: str, grace: int | None = None) -> None:
        await self.api.delete(f"{PODS}/{name}", grace=grace)

    async def until_deleted(self, name: str) -> None:
        await self.pods.until(
            lambda: key(name) not in self.pods.objects, PATIENCE, f"{name} is not deleted"
        )

    async def gpus_held(self, name: str) -> Mapping[str, list[str]]:
        """The GPUs of the ids that the kubelet gave each container of a pod, sorted."""
        held = await self.kubelet.held(RESOURCE)
        return {
            container: sorted(gpu_of(text) for text in ids)
            for (pod, container), ids in held.items()
            if pod == key(name)
        }

    def telling(self, pod: Object) -> Object:
        """The same pod, each of whose containers writes its environment and mounts to a directory.

        What its namesake told is forgotten.
        """
        for file in self.told_directory().glob(f"{name_of(pod)}.*"):
            file.unlink()
        spec: dict[str, Any] = dict(pod["spec"])
        for kind in ("containers", "initContainers"):
            if kind in spec:
                spec[kind] = [_telling(name_of(pod), one) for one in spec[kind]]
        where = {"path": str(self.told_directory()), "type": "DirectoryOrCreate"}
        volume = {"name": "tell", "hostPath": where}
        return {**pod, "spec": {**spec, "volumes": [*spec.get("volumes", ()), volume]}}

    def a_telling_pod(self, name: str, *, gpus: int = 1, memory: int = 3000) -> Object:
        """A pod of one container, which tells; as in `a_container`."""
        return self.telling(a_pod(name, a_container(gpus=gpus, memory=memory)))

    def told_directory(self) -> Path:
        return self.root / "told"

    async def until_told(self, *names: str, within: float = PATIENCE) -> None:
        """Return once every container of those telling pods has told. Raises TimeoutError."""
        directory = self.told_directory()
        marks = [
            directory / f"{name}.{one['name']}.done"
            for name in names
            for one in containers_of(self.as_seen(name))
        ]

        def missing() -> list[Path]:
            return [mark for mark in marks if not mark.exists()]

        await until(
            lambda: not missing(),
            within,
            lambda: f"{[*map(str, missing())]} are not told; refused: {self.refusals()}",
        )

    # Placed by hand, step by step, as HAMi's scheduler does: for tests that need the gaps.

    def share(self, index: int, memory: int = 3000, cores: int = 10) -> Share:
        return Share(self.gpu_uuids()[index], memory, cores)

    async def place(
        self, pod: Object, groups: Sequence[Sequence[Share]], *, locked: bool = True
    ) -> None:
        """Create a pod for no scheduler, note each container's shares, take the lock, and bind it.

        Whoever had the lock loses it.
        """
        path, at = f"{PODS}/{name_of(pod)}", now()
        stamp = str(int(at.timestamp()))
        labels = {**pod["metadata"].get("labels", {}), "hami.io/webhook": "ignore"}
        metadata = {**pod["metadata"], "labels": labels}
        spec = {**pod["spec"], "schedulerName": "by-hand"}
        await self.api.create(PODS, {**pod, "metadata": metadata, "spec": spec})
        given = placement_patch(NODE, tuple(map(tuple, groups)), int(at.timestamp()))
        await self.api.patch(path, given)
        if locked:
            lock = {annotations.MUTEX_LOCK: encode_node_lock(at, NAMESPACE, name_of(pod))}
            await self.api.patch(NODE_PATH, {"metadata": {"annotations": lock}})
        marks = {annotations.BIND_PHASE: annotations.PHASE_ALLOCATING, annotations.BIND_TIME: stamp}
        await self.api.patch(path, {"metadata": {"annotations": marks}})
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        await self.api.create(
            f"{path}/binding", {"metadata": {"name": name_of(pod)}, "target": target}
        )

    def kubelet_said(self, *words: str, since: float) -> list[float]:
        """When the kubelet logged a line with all those words after a moment, in Unix seconds."""
        said = self.kubelet.part.said().splitlines()
        lines = (line for line in said if all(word in line for word in words))
        stamps = (stamp for line in lines if (stamp := klog_stamp(line)) is not None)
        return [stamp for stamp in stamps if stamp >= since]

    async def until_kubelet_says(self, *words: str, since: float) -> float:
        """When the kubelet logs those words for the first time after a moment, in Unix seconds."""

        async def is_said() -> bool:
            return bool(self.kubelet_said(*words, since=since))

        await until_answer(is_said, 30.0, lambda: f"the kubelet has not said {words}")
        return self.kubelet_said(*words, since=since)[0]


# When something happened, by the stamps of those who saw it: all clocks here are one machine's.


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)  # noqa: TID251 -- what is written is read by others


def wall() -> float:
    return now().timestamp()


def agent_said(agent: Agent, event: str, since: float) -> list[float]:
    """When the agent logged an event after a moment, in Unix seconds."""
    return [stamp for one in agent.events(event) if (stamp := unix(one["ts"])) >= since]


def unix(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()


def klog_stamp(line: str) -> float | None:
    """A stamp of klog, which names no year and no zone: this one, and the machine's."""
    found = _STAMP.match(line)
    if found is None:
        return None
    month, day, hour, minute, second, micro = map(int, found.groups())
    year = now().astimezone().year
    local = dt.datetime(year, month, day, hour, minute, second, micro)  # noqa: DTZ001 -- made so
    return local.astimezone().timestamp()
