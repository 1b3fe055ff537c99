"""A busy node for the page: many GPUs and containers, one GPU bad, one watched, one cordoned."""

import datetime as dt

import msgspec

from agent.cluster import CORDON, MUTEX_LOCK, NodeView, PodTable
from agent.ledger import JournalEntry, Ledger
from agent.model import Condition, GpuSample, Health, SliceGroup, SliceList, slice_id
from agent.node import Check
from agent.status import NodeStatus, SettingStatus, StatusFacts
from tests.builders import (
    EPOCH,
    NOON,
    a_container_use,
    a_gpu,
    a_gpu_use,
    a_pod,
    a_pod_uid,
    a_row,
    a_share,
    a_shared_gpu,
    a_uuid,
    an_inventory,
)

NOW = NOON + dt.timedelta(hours=5, minutes=4, seconds=7)
TEAMS = ("llm", "vision", "speech", "research")
JOBS = ("llama-serve-7c9d8f6b5", "train-resnet", "whisper-batch-6fd4c8", "notebook-ana")
CHECKS = "state inventory server registered stream api_synced api report settings driver gpus"


def busy(gpus=16, each=10, name=None, text="", **changes) -> StatusFacts:
    """The facts of a node with that many GPUs and containers on each.

    `name(number)`: the pod's name; `text`: added to each text of the journal.
    """
    rows = [_row(gpu, slot, name) for gpu in range(gpus) for slot in range(each)]
    facts = {
        "now": NOW,
        "about": NodeStatus(
            name="gpu-a07",
            version="0.3.0",
            started_at=NOW - dt.timedelta(days=3, hours=4),
            resource="nvidia.com/gpu",
            kubelet="registered, and the kubelet takes the lists",
            profiles=("h100-pool",),
            split_count=10,
            memory_scaling=1.5,
            core_scaling=1.0,
        ),
        "checks": _checks(gpus),
        "node": NodeView(
            "gpu-a07",
            "uid",
            "1",
            annotations={
                CORDON: a_uuid(3),
                MUTEX_LOCK: f"{(NOW - dt.timedelta(seconds=3)):%Y-%m-%dT%H:%M:%SZ},llm,llama-9",
            },
        ),
        "inventory": an_inventory(gpus=[_gpu(n) for n in range(gpus)]),
        "slices": SliceList(1, tuple(_group(n, each) for n in range(gpus))),
        "ledger": Ledger(rows=tuple(rows)),
        "newest": _sample,
        "used": _use_of(rows).get,
        "changes": _changes(text),
        "refusals": _refusals(text),
        "journal_since": NOW - dt.timedelta(days=3),
        "settings": _settings,
        "kubelet": EPOCH,
        "pods": PodTable({row.key.pod_uid: _unlimited(row) for row in rows[8:10]}),
    }
    return StatusFacts(**{**facts, **changes})


def _row(gpu, slot, name):
    number = gpu * 10 + slot
    pod = name(number) if name else f"{JOBS[(number * 7) % 4]}-{number:03d}"
    share = a_share(
        uuid=a_uuid(gpu), memory_mib=(6144, 8192, 12288, 4096)[slot % 4], core_percent=slot % 3 * 5
    )
    return a_row(
        pod_uid=a_pod_uid(number),
        namespace=TEAMS[number % 4],
        pod=pod,
        shares=(share,),
        slice_ids=(slice_id(a_uuid(gpu), slot),),
        answered_at=NOW - dt.timedelta(minutes=17 * number + 2),
        confirmed=number != 5,
    )


def _unlimited(row):
    """The pod of the row, which nothing keeps within its limits."""
    pod = a_pod(uid=row.key.pod_uid, namespace=row.namespace, name=row.pod)
    return msgspec.structs.replace(pod, runtime_class="kata-qemu")


def _gpu(number):
    health = {
        1: Health(
            Condition.BAD,
            NOW - dt.timedelta(minutes=4),
            "xid",
            "XID 79: the GPU fell off the bus; needed: a reboot of the node [H-079]",
            action="reboot",
            runbook="H-079",
            serving=False,
        ),
        2: Health(
            Condition.WATCH,
            NOW - dt.timedelta(minutes=11),
            "xid",
            "XID 94: contained memory error; it is ok again after a quiet time [H-094]",
            action="wait",
            runbook="H-094",
        ),
    }.get(number, Health(Condition.OK, NOON))
    return a_shared_gpu(gpu=a_gpu(index=number), health=health, registered_mib=122_338)


def _use_of(rows):
    """Each container uses half of its memory; each seventh ran no kernel for a day."""
    return {
        row.key: a_container_use(
            a_gpu_use(row.shares[0].uuid, mib=row.shares[0].memory_mib // 2, sm_percent=n % 40),
            at=NOW,
            idle=dt.timedelta(days=1) if n % 7 == 0 else dt.timedelta(seconds=n % 5),
        )
        for n, row in enumerate(rows)
    }


def _group(number, each):
    ids = tuple(slice_id(a_uuid(number), n) for n in range(max(10, each)))
    return SliceGroup(a_uuid(number), ids, healthy=number != 1, numa=0)


def _sample(uuid):
    number = int(uuid.removeprefix("GPU-").partition("-")[0], 16)
    n = 179 if number != 1 else 139
    return GpuSample(
        uuid,
        gpu_percent=(n * (number + 3) // 4 + number * 13 + (n // 30 % 3) * 25) % 97,
        memory_percent=10,
        used_mib=(number * 4_321 + n * 90) % 74_000,
    )


def _checks(gpus):
    ill = "GPU 1 is bad: XID 79: the GPU fell off the bus; needed: a reboot of the node [H-079]"
    found = [Check(name, ok=True) for name in CHECKS.split()]
    return (*found, Check("gpu_health", gpus < 2, ill, required=False))


def _changes(text):
    return tuple(
        JournalEntry(
            NOW - dt.timedelta(minutes=4 + 50 * n), reason, f"{said}{text}", warning, namespace, pod
        )
        for n, (reason, said, warning, namespace, pod) in enumerate(
            (
                ("GpuUnhealthy", "GPU 1 is bad: XID 79: the GPU fell off the bus [H-079]", *PLAIN),
                ("GpuWatched", "GPU 2: XID 94: contained memory error [H-094]", *PLAIN),
                ("GpuRecovered", "GPU 6 is ok again after 10 min without a fault", False, "", ""),
                ("SliceMismatch", "The kubelet booked GPU 4, not GPU 3", True, "vision", "train-1"),
            )
            * 5
        )
    )


PLAIN = (True, "", "")


def _refusals(text):
    said = (
        "the node lock names llm/llama-8, not this pod: annotations without the lock give no right"
    )
    return tuple(
        JournalEntry(
            NOW - dt.timedelta(minutes=9 + 31 * n),
            "HA-2004",
            f"{said}{text}",
            namespace="research",
            pod=f"probe-{n}",
            container="main",
        )
        for n in range(12)
    )


def _settings():
    chosen = ("sharing.memoryScaling", "sharing.splitCount", "health.quietPeriod")
    return tuple(
        SettingStatus(key, "1.5", f"/etc/hami-agent/config.yaml:{n + 3}:5")
        for n, key in enumerate(chosen)
    ) + tuple(
        SettingStatus(f"section{n % 7}.settingNumber{n}", n * 10, "default") for n in range(66)
    )
