"""What a container must find inside, by its pod's annotation and nothing of ours; and what it saw.

Only telling pods say what they saw; see lab/pods.py.
"""

import re
from collections.abc import Sequence
from typing import Final

from agent.ledger import Row
from agent.model import GpuUuid, Share
from agent.state import decode_state
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import Object, notes_of
from tests.peers.lab.pods import WithPods, containers_of, is_up, key, lives, name_of, phase_of

ALLOCATED: Final = "hami.io/vgpu-devices-allocated"
WHOLE: Final = (81559, 100, 10)
"""What there is of an H100: MiB, percent and slots."""

_DISABLED: Final = "CUDA_DISABLE_CONTROL"
_OURS: Final = ("NVIDIA_", "CUDA_", "LIBCUDA_", "GPU_")
_HOOK: Final = "/usr/local/vgpu"
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


Mounted = tuple[str, bool]
"""What lies at a place inside, as a path below /usr/local, and whether it is read-only."""
Inside = dict[str, tuple[dict[str, str], dict[str, Mounted]]]
"""By container, the variables and the mounts that a grant decides."""


def grants(pod: Object) -> dict[str, tuple[Share, ...]]:
    """The shares of each container of a pod, init containers first; without GPU it has none.

    Groups are those of the containers that ask, in this order: HAMi's scheduler drops the empty
    ones of others, or keeps them, from version to version.
    Source: HAMi v2.10 pkg/device/devices.go, EncodePodSingleDevice.
    """
    text = notes_of(pod).get(ALLOCATED, "")
    groups = [_group(one) for one in text.split(";") if one]
    asking = [one["name"] for one in containers_of(pod) if _asks(one)]
    granted = dict(zip(asking, groups, strict=True))
    return {one["name"]: granted.get(one["name"], ()) for one in containers_of(pod)}


def _asks(container: Object) -> bool:
    return RESOURCE in container.get("resources", {}).get("limits", {})


def _group(text: str) -> tuple[Share, ...]:
    devices = (device.split(",") for device in text.split(":") if device)
    return tuple(Share(GpuUuid(uuid), int(mib), int(percent)) for uuid, _, mib, percent in devices)


def expected_environment(given: Sequence[Share], gpus: Sequence[str]) -> dict[str, str]:
    """The variables for these shares; `gpus` are the node's UUIDs as CUDA counts them."""
    if not given:
        return {}
    ordered = sorted(given, key=lambda grant: gpus.index(grant.uuid))
    limits = {
        f"CUDA_DEVICE_MEMORY_LIMIT_{i}": f"{one.memory_mib}m" for i, one in enumerate(ordered)
    }
    if len({one.uuid for one in ordered}) > 1:
        limits["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return limits | {
        "NVIDIA_VISIBLE_DEVICES": ",".join(one.uuid for one in ordered),
        "CUDA_DEVICE_SM_LIMIT": str(ordered[0].core_percent),
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": f"{_HOOK}/<uuid>.cache",
        "LIBCUDA_LOG_LEVEL": "1",
    }


def expected_mounts(uid: str, container: str, *, controlled: bool = True) -> dict[str, Mounted]:
    """The mounts of a container with a GPU; `controlled` False: it wants no HAMi-core."""
    own = (f"/vgpu/containers/{uid}_{container}", False)
    found = {
        _HOOK: own,
        f"{_HOOK}/libvgpu.so": ("/vgpu/libvgpu.so", True),
        "/tmp/vgpulock": own,  # noqa: S108 -- libvgpu.so's
    }
    if controlled:
        found["/etc/ld.so.preload"] = ("/vgpu/ld.so.preload", True)
    return found


Container = tuple[str, str]
"""A pod's `namespace/name` and a container's name."""

DECIDED_WITHIN: Final = 90.0
"""Seconds until a pod runs or is refused: the scheduler places one pod at a time."""


class WithGrants(WithPods):
    def told_environment(self, pod: str, container: str = "main") -> dict[str, str]:
        text = (self.told_directory() / f"{pod}.{container}.env").read_text()
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def _seen_environment(self, pod: str, container: str) -> dict[str, str]:
        cache = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
        return {
            name: _UUID.sub("<uuid>", value, count=1) if name == cache else value
            for name, value in self.told_environment(pod, container).items()
            if name.startswith(_OURS)
        }

    def seen_mounts(self, pod: str, container: str = "main") -> dict[str, Mounted]:
        """What a container saw mounted from the hook path or at one of HAMi's places."""
        lines = (self.told_directory() / f"{pod}.{container}.mounts").read_text().splitlines()
        fields = (line.split(" ") for line in lines)
        found = {one[4]: (one[3], "ro" in one[5].split(",")) for one in fields}
        places = expected_mounts("", "")
        return {
            place: mounted
            for place, mounted in found.items()
            if place in places or mounted[0].startswith("/vgpu")
        }

    def expected_inside(self, name: str) -> Inside:
        """What each container of a pod must find, by what the scheduler wrote for it."""
        pod, gpus = self.as_seen(name), self.gpu_uuids()
        uid, given = pod["metadata"]["uid"], grants(pod)
        found: Inside = {}
        for container in containers_of(pod):
            own = {one["name"]: one["value"] for one in container.get("env", ()) if "value" in one}
            kept = {variable: own[variable] for variable in own if variable.startswith(_OURS)}
            who = container["name"]
            mounts = expected_mounts(uid, who, controlled=own.get(_DISABLED) != "true")
            environment = expected_environment(given[who], gpus) | kept
            found[who] = (environment, mounts if given[who] else {})
        return found

    async def seen_inside(self, name: str) -> Inside:
        """What each container of a telling pod found. Raises TimeoutError: they do not tell."""
        await self.until_told(name)
        return {
            who: (self._seen_environment(name, who), self.seen_mounts(name, who))
            for who in (one["name"] for one in containers_of(self.as_seen(name)))
        }

    def oversold(self) -> dict[str, tuple[int, int, int]]:
        """What the pods that run have of the GPUs of which they have more than there is."""
        totals: dict[str, tuple[int, int, int]] = {}
        for pod in self.pods.objects.values():
            given = grants(pod).values() if ALLOCATED in notes_of(pod) and lives(pod) else ()
            for one in (share for shares in given for share in shares):
                mib, percent, slots = totals.get(one.uuid, (0, 0, 0))
                totals[one.uuid] = (mib + one.memory_mib, percent + one.core_percent, slots + 1)
        return {
            uuid: load
            for uuid, load in totals.items()
            if any(one > most for one, most in zip(load, WHOLE, strict=True))
        }

    def all_rows(self) -> Sequence[Row]:
        """The ledger as it is on disk. Raises OSError, StateCorrupt."""
        content = (self.space.view / "var/lib/hami-agent/state.json").read_bytes()
        return decode_state(content).ledger.rows

    def rows(self) -> dict[Container, Row]:
        """The same by container; of two pods of one name the later one's."""
        return {(f"{row.namespace}/{row.pod}", row.key.container): row for row in self.all_rows()}

    def lost(self) -> list[str]:
        """What runs with GPUs and is not in the ledger as it was promised, or has no directory."""
        ledger = self.rows()
        return [
            words
            for key, pod in self.pods.objects.items()
            for container in lives(pod).keys()
            & {one["name"] for one in containers_of(pod) if _asks(one)}
            if (words := self._loss(pod, container, ledger.get((key, container))))
        ]

    def _loss(self, pod: Object, container: str, row: Row | None) -> str:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        if row is None or row.key.pod_uid != uid:
            return f"{name}: container {container} runs and has no row"
        if sorted(row.shares, key=str) != sorted(grants(pod)[container], key=str):
            return f"{name}: container {container} has {row.shares} in the ledger"
        if not (self.hook / "containers" / f"{uid}_{container}").is_dir():
            return f"{name}: container {container} runs and has no directory"
        return ""

    async def decided(self, made: Object) -> Object:
        """The pod once it runs or was refused, and no other of its name. Raises TimeoutError."""
        name, uid = name_of(made), made["metadata"]["uid"]
        objects = self.pods.objects

        def is_decided() -> bool:
            pod = objects.get(key(name))
            this = pod is not None and pod["metadata"]["uid"] == uid
            return this and (is_up(objects[key(name)]) or phase_of(objects[key(name)]) == "Failed")

        await self.pods.until(is_decided, DECIDED_WITHIN, f"{name} neither runs nor fails")
        return objects[key(name)]
