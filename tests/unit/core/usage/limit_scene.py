"""A node on which containers run under limits: rows with their answers, GPUs and pods."""

import datetime as dt
from collections.abc import Iterable

from agent.core.cluster.pods import Phase, PodTable, PodView
from agent.core.containers.container_edits import PRELOAD_FILE
from agent.core.containers.edits import ContainerEdits, MountEdit
from agent.core.inventory.inventory import Inventory
from agent.core.inventory.share import Share
from agent.core.inventory.slices import MIB
from agent.core.state.ledger import Ledger, Row
from agent.core.usage.live_limits import LimitFacts
from agent.core.usage.region import MemoryUse, RegionState
from agent.core.usage.use import ContainerGpuUse, ContainerUse
from tests.builders import (
    G1,
    G2,
    NOON,
    a_gpu,
    a_pod,
    a_pod_uid,
    a_row,
    a_share,
    a_shared_gpu,
    an_inventory,
)

PRELOAD = MountEdit(PRELOAD_FILE, "/usr/local/vgpu/ld.so.preload", read_only=True)
GPUS = an_inventory(
    gpus=[
        a_shared_gpu(gpu=a_gpu(index=0, uuid=G1), registered_mib=10_000),
        a_shared_gpu(gpu=a_gpu(index=1, uuid=G2), registered_mib=10_000),
    ]
)


def edits_of(
    *mib: int, envs: Iterable[tuple[str, str]] = (), preload: bool = True
) -> ContainerEdits:
    """The answer of a container with so many MiB of each of its GPUs."""
    limits = [(f"CUDA_DEVICE_MEMORY_LIMIT_{place}", f"{each}m") for place, each in enumerate(mib)]
    mounts = (PRELOAD,) if preload else ()
    return ContainerEdits(envs=tuple(sorted([*limits, *envs])), mounts=mounts)


def a_limited_row(number: int = 1, *shares: Share, **fields: object) -> Row:
    """The row of pod `pN`; by default it has 3000 MiB and 30 % of GPU 0."""
    held = shares or (a_share(),)
    fields.setdefault("edits", edits_of(*(share.memory_mib or 10_000 for share in held)))
    return a_row(pod_uid=a_pod_uid(number), pod=f"p{number}", shares=held, **fields)  # type: ignore[arg-type]


def pod_of(row: Row, phase: Phase = Phase.RUNNING, **fields: object) -> PodView:
    """The row's pod."""
    return a_pod(uid=row.key.pod_uid, name=row.pod, phase=phase, **fields)  # type: ignore[arg-type]


def facts_of(
    *rows: Row, pods: Iterable[PodView] | None = None, gpus: Inventory = GPUS
) -> LimitFacts:
    """What a decision reads; each row has its pod unless `pods` are given."""
    there = map(pod_of, rows) if pods is None else pods
    table = PodTable({pod.uid: pod for pod in there}, synced=True)
    return LimitFacts(Ledger(rows), gpus, table.pods)


def using(*mib: int, state: RegionState = RegionState.READABLE, reason: str = "") -> ContainerUse:
    """A container that uses so many MiB of GPU 0, GPU 1."""
    gpus = tuple(
        ContainerGpuUse(place, uuid, 0, 100, MemoryUse(total=each * MIB), 0)
        for place, (uuid, each) in enumerate(zip((G1, G2), mib, strict=False))
    )
    return ContainerUse(NOON + dt.timedelta(0), state, gpus, reason=reason)
