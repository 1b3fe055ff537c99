"""A busy node for the page: many GPUs and containers, one GPU bad, one watched, one cordoned."""

import datetime as dt

import msgspec

from agent.cluster import NodeView, PodTable
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
from tests.recorded import FOLDER

NOW = NOON + dt.timedelta(hours=5, minutes=4, seconds=7)
TEAMS = ("llm", "vision", "speech", "research")
JOBS = ("llama-serve-7c9d8f6b5", "train-resnet", "whisper-batch-6fd4c8", "notebook-ana")
CHECKS = "state inventory server registered stream api_synced api report settings driver gpus"


class BusyText(msgspec.Struct):
    """What stands in tests/golden/busy.json: what a node says besides GPUs and containers."""

    about: NodeStatus
    node: NodeView
    check: Check
    health: dict[int, Health]
    changes: tuple[JournalEntry, ...]
    refusals: tuple[JournalEntry, ...]
    settings: tuple[SettingStatus, ...]


TOLD = msgspec.json.decode((FOLDER / "busy.json").read_bytes(), type=BusyText)


def busy(gpus=16, each=10, name=None, text="", **changes) -> StatusFacts:
    """The facts of a node with that many GPUs and containers on each.

    `name(number)`: the pod's name; `text`: added to each text of the journal.
    """
    rows = [_row(gpu, slot, name) for gpu in range(gpus) for slot in range(each)]
    facts = {
        "now": NOW,
        "about": TOLD.about,
        "checks": (
            *(Check(name, ok=True) for name in CHECKS.split()),
            msgspec.structs.replace(TOLD.check, ok=gpus < 2),
        ),
        "node": TOLD.node,
        "inventory": an_inventory(gpus=[_gpu(n) for n in range(gpus)]),
        "slices": SliceList(1, tuple(_group(n, each) for n in range(gpus))),
        "ledger": Ledger(rows=tuple(rows)),
        "newest": _sample,
        "used": _use_of(rows).get,
        "changes": lambda: _again(TOLD.changes, 5, 50, text),
        "refusals": lambda: _again(TOLD.refusals, 12, 31, text),
        "journal_since": lambda: NOW - dt.timedelta(days=3),
        "settings": lambda: (
            *TOLD.settings,
            *(SettingStatus(f"section{n % 7}.setting{n}", n * 10, "default") for n in range(66)),
        ),
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
    health = TOLD.health.get(number, Health(Condition.OK, NOON))
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


def _again(entries, times, every, text):
    """The entries so many times, each `every` minutes older, about another pod if about one."""
    return tuple(
        msgspec.structs.replace(
            one,
            at=one.at - n * dt.timedelta(minutes=every),
            text=f"{one.text}{text}",
            pod=one.pod.replace("probe-0", f"probe-{n}"),
        )
        for n, one in enumerate(entries * times)
    )
