"""What pods were given of each GPU, as HAMi counts it, and whether there is room for more."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from agent.core.inventory.share import Share
from agent.sandbox.api_errors import Json
from tests.machine.kubelet import RESOURCE, MemoryKubelet
from tests.machine.pods import GPU_MIB
from tests.machine.scheduling import Scheduler

Amount = tuple[int, int]
"""MiB and percent of compute."""


class MachineRoom:
    """`granted`: what each pod's containers were given, by GPU. `pod` finds one at the API server.

    Thousands of pods that are over cost nothing: only those that the kubelet knows are looked at.
    """

    def __init__(
        self, kubelet: MemoryKubelet, scheduler: Scheduler, pod: Callable[[str], Json | None]
    ) -> None:
        self.granted: defaultdict[str, dict[str, Mapping[str, Amount]]] = defaultdict(dict)
        self._kubelet = kubelet
        self._scheduler = scheduler
        self._pod = pod

    def is_live(self, uid: str) -> bool:
        """Whether a pod counts: it is there, not over, and its node does not call it rejected."""
        pod, node = self._pod(uid), self._kubelet.node.pods.get(uid)
        is_over = pod is None or pod["status"].get("phase") in ("Succeeded", "Failed")
        return not is_over and node is not None and not node.is_rejected

    def used(self, gpu: str, without: str = "") -> Amount:
        """MiB and compute of the GPU that live pods were given, all but one pod."""
        known = self._kubelet.node.pods
        used = [self._use(uid, gpu) for uid in known if uid in self.granted and uid != without]
        return sum(mib for mib, _ in used), sum(cores for _, cores in used)

    def is_oversold(self, uid: str) -> bool:
        """Whether the pods that were answered leave it no room: then the scheduler erred.

        HAMi does where it has written over what a bound pod has, or where a tenant has.
        """
        pod = self._pod(uid)
        groups = [group for group in self._scheduler.placed.get(uid, ()) if group]
        if pod is None:
            return False
        inits = len(pod["spec"].get("initContainers") or ())
        for gpu in {str(share.uuid) for group in groups for share in group}:
            wanted = _counted(inits, [_of_group(group, gpu) for group in groups])
            used = self.used(gpu, without=uid)
            if wanted[0] + used[0] > GPU_MIB or wanted[1] + used[1] > 100:
                return True
        return False

    def _use(self, uid: str, gpu: str) -> Amount:
        """What HAMi 2.10 counts for a pod: once all init containers have succeeded, less."""
        node = self._kubelet.node.pods.get(uid)
        if node is None or not self.is_live(uid):
            return 0, 0
        asking = [one for one in node.spec.containers if one.limits.get(RESOURCE)]
        given = [self.granted[uid].get(one.name, {}).get(gpu, (0, 0)) for one in asking]
        inits = sum(one.kind != "app" for one in node.spec.containers)
        if self._is_past_init(uid):
            return _counted(0, given[inits:])
        return _counted(inits, given)

    def _is_past_init(self, uid: str) -> bool:
        pod = self._pod(uid)
        found = (pod or {"status": {}})["status"].get("initContainerStatuses") or ()
        ends = [(one.get("state") or {}).get("terminated") or {} for one in found]
        return bool(ends) and all(end.get("exitCode") == 0 for end in ends)


def _of_group(group: Sequence[Share], gpu: str) -> Amount:
    shares = [share for share in group if str(share.uuid) == gpu]
    mib = sum(share.memory_mib or GPU_MIB for share in shares)
    return mib, sum(share.core_percent for share in shares)


def _counted(inits: int, amounts: Sequence[Amount]) -> Amount:
    """The greater of the largest init container and the sum of the others.

    HAMi counts by places and gives none to a container without GPUs: behind an init container
    without any, an app container stands in the place of an init container.
    """
    peaks, apps = amounts[:inits], amounts[inits:]
    mib = max((0, *(mib for mib, _ in peaks), sum(mib for mib, _ in apps)))
    cores = max((0, *(cores for _, cores in peaks), sum(cores for _, cores in apps)))
    return mib, cores
