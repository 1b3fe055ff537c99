"""What pods were given of each GPU: what is true, what HAMi counts, and whether one more fits."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from agent.model import Share
from agent.sandbox.api_errors import Json
from tests.machine.kubelet import RESOURCE, MemoryKubelet
from tests.machine.pods import GPU_MIB
from tests.machine.scheduling import Scheduler

Amount = tuple[int, int]
"""MiB and percent of compute."""
NONE: Amount = (0, 0)


class MachineRoom:
    """`granted`: what each pod's containers were given, by GPU. `pod` finds one at the API server.

    Thousands of pods that are over cost nothing: only those that the kubelet knows are looked at.
    """

    def __init__(
        self, kubelet: MemoryKubelet, scheduler: Scheduler, pod: Callable[[str], Json | None]
    ) -> None:
        self._past_init: defaultdict[str, set[str]] = defaultdict(set)
        """The init containers that have succeeded, by pod: a rejection hides them in its status."""
        self.granted: defaultdict[str, dict[str, Mapping[str, Amount]]] = defaultdict(dict)
        self._kubelet = kubelet
        self._scheduler = scheduler
        self._pod = pod

    def is_live(self, uid: str) -> bool:
        """Whether a pod counts: it is there, not over, and its node does not call it rejected."""
        pod, node = self._pod(uid), self._kubelet.node.pods.get(uid)
        is_over = pod is None or pod["status"].get("phase") in ("Succeeded", "Failed")
        return not is_over and node is not None and not node.is_rejected

    def excess(self, uid: str, gpu: str) -> str:
        """Why what was given of the GPU is too much for that pod to be served; empty: it is not.

        A pod alone must truly fit. With others, what is true or what HAMi counts must.
        """
        own, true, counted = self._sums(gpu)
        if _is_over(own.get(uid, NONE)):
            return f"{uid} alone takes {own[uid]}"
        return f"{true}, by HAMi {counted}" if _is_over(true) and _is_over(counted) else ""

    def is_oversold(self, uid: str) -> bool:
        """Whether the pods that were answered leave it no room: then the scheduler erred.

        HAMi does where it has written over what a bound pod has, or where a tenant has, and where
        it takes sidecars of one pod for init containers.
        """
        pod = self._pod(uid)
        groups = [group for group in self._scheduler.placed.get(uid, ()) if group]
        if pod is None:
            return False
        inits = pod["spec"].get("initContainers") or ()
        roles = [
            "sidecar" if one.get("restartPolicy") == "Always" else "init"
            for one in inits
            if (one.get("resources", {}).get("limits") or {}).get(RESOURCE)
        ]
        roles += ["app"] * (len(groups) - len(roles))
        for gpu in {str(share.uuid) for group in groups for share in group}:
            amounts = [_of_group(group, gpu) for group in groups]
            own = _true(roles[: len(amounts)], amounts)  # a request that HAMi drops has no group
            true = _sum((own, *(use for other, use in self._sums(gpu)[0].items() if other != uid)))
            counted = _counted(len(inits), amounts)
            counted = _sum((counted, self._sums(gpu, without=uid)[2]))
            if _is_over(own) or (_is_over(true) and _is_over(counted)):
                return True
        return False

    def is_full_by_status(self, uid: str) -> bool:
        """Whether another live pod of its GPUs has ended its init phase, and its status hides that.

        A rejection empties the status; while its containers run, the pod does not become Failed.
        """
        placed = self._scheduler.placed.get(uid, ())
        gpus = {str(share.uuid) for group in placed for share in group}
        return any(
            other != uid
            and any(gpus & given.keys() for given in self.granted[other].values())
            and self.is_live(other)
            and not ((self._pod(other) or {})["status"].get("initContainerStatuses"))
            and self._is_past_init(other)[0]
            and bool(self._past_init.get(other))
            for other in tuple(self.granted)
        )

    def _sums(self, gpu: str, without: str = "") -> tuple[Mapping[str, Amount], Amount, Amount]:
        """What each live pod truly takes of the GPU, the sum, and what HAMi 2.10 counts in all."""
        there = self._kubelet.node.pods
        live = [
            uid for uid in there if uid in self.granted and uid != without and self.is_live(uid)
        ]
        true, counted = {}, []
        for uid in live:
            boxes = [one for one in there[uid].spec.containers if one.limits.get(RESOURCE)]
            given = [self.granted[uid].get(one.name, {}).get(gpu, NONE) for one in boxes]
            ended, all_ended = self._is_past_init(uid)
            kept = [
                NONE if box.kind == "init" and ended else amount
                for box, amount in zip(boxes, given, strict=True)
            ]
            true[uid] = _true([box.kind for box in boxes], kept)
            inits = sum(one.kind != "app" for one in there[uid].spec.containers)
            counted.append(_counted(0, given[inits:]) if all_ended else _counted(inits, given))
        return true, _sum(true.values()), _sum(counted)

    def _is_past_init(self, uid: str) -> tuple[bool, bool]:
        """Whether the ordinary init containers have succeeded, and whether sidecars have, too."""
        pod = self._pod(uid) or {"spec": {}, "status": {}}
        found = pod["status"].get("initContainerStatuses") or ()
        well = self._past_init[uid]
        well |= {
            one["name"]
            for one in found
            if ((one.get("state") or {}).get("terminated") or {}).get("exitCode") == 0
        }
        inits = pod["spec"].get("initContainers") or ()
        ordinary = {one["name"] for one in inits if one.get("restartPolicy") != "Always"}
        return ordinary <= well, bool(well) and {one["name"] for one in inits} <= well


def _of_group(group: Sequence[Share], gpu: str) -> Amount:
    shares = [share for share in group if str(share.uuid) == gpu]
    mib = sum(share.memory_mib or GPU_MIB for share in shares)
    return mib, sum(share.core_percent for share in shares)


def _is_over(amount: Amount) -> bool:
    return amount[0] > GPU_MIB or amount[1] > 100


def _sum(amounts: Iterable[Amount]) -> Amount:
    mib, cores = zip(NONE, *amounts, strict=True)
    return sum(mib), sum(cores)


def _true(kinds: Sequence[str], amounts: Sequence[Amount]) -> Amount:
    """Kubernetes' sum: each init container beside the sidecars before it; sidecars and apps."""
    steps = list(zip(kinds, amounts, strict=True))
    lasting = [amount for kind, amount in steps if kind != "init"]
    peaks = [
        _sum((amount, *(before for kind, before in steps[:place] if kind == "sidecar")))
        for place, (kind, amount) in enumerate(steps)
        if kind == "init"
    ]
    mib, cores = zip(_sum(lasting), *peaks, strict=True)
    return max(mib), max(cores)


def _counted(inits: int, amounts: Sequence[Amount]) -> Amount:
    """The greater of the largest init container and the sum of the others.

    HAMi counts by places and gives none to a container without GPUs: behind an init container
    without any, an app container stands in the place of an init container.
    """
    peaks, apps = amounts[:inits], amounts[inits:]
    mib = max((0, *(mib for mib, _ in peaks), sum(mib for mib, _ in apps)))
    cores = max((0, *(cores for _, cores in peaks), sum(cores for _, cores in apps)))
    return mib, cores
