"""A container that has ended is shown as ended, and counts in no sum, before its row is closed."""

import dataclasses

import msgspec
import pytest

from agent.allocate.room import promised
from agent.cli.status import StatusStyle, pod_lines, status_lines
from agent.cluster import Phase, PodTable, PodView, Role
from agent.ledger import Ledger, Row
from agent.status import status_of
from agent.web.page import page_html
from tests.builders import (
    NOON,
    a_container,
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
from tests.doors.api_facts import facts
from tests.doors.metrics_page import facts as cells_of
from tests.doors.metrics_page import series
from tests.unit.core.allocation.plain_scene import a_plain_row

GPU = a_shared_gpu(gpu=a_gpu(index=0), registered_mib=81559)
INIT, MAIN = a_container(name="init", role=Role.INIT), a_container()


def past(*containers):
    return tuple(
        msgspec.structs.replace(one, has_run=True, succeeded=one.role is Role.INIT)
        for one in containers
    )


@dataclasses.dataclass(frozen=True)
class ContainerSeen:
    """What the agent knows of one container of 70,000 MiB, beside one of 60,000 that runs."""

    pods: tuple[PodView, ...]
    ended: bool
    row: Row = dataclasses.field(
        default_factory=lambda: a_row(shares=(a_share(uuid=a_uuid(0), memory_mib=70000),))
    )
    synced: bool = True
    stale: bool = False

    @property
    def ledger(self) -> Ledger:
        share = a_share(uuid=a_uuid(0), memory_mib=60000)
        return Ledger((self.row, a_row(pod_uid=a_pod_uid(9), pod="other", shares=(share,))))

    @property
    def table(self) -> PodTable:
        pods = (*self.pods, a_pod(uid=a_pod_uid(9), name="other", phase=Phase.RUNNING))
        there = {pod.uid: pod for pod in pods if self.synced}
        return PodTable(there, (), synced=self.synced, stale=self.stale)


POD = a_pod(phase=Phase.RUNNING)
OF_INIT = a_row(
    container="init", role=Role.INIT, shares=(a_share(uuid=a_uuid(0), memory_mib=70000),)
)
SEEN = {
    "it runs": ContainerSeen((POD,), ended=False),
    "it is being admitted": ContainerSeen((a_pod(),), ended=False),
    "it was deleted": ContainerSeen((), ended=True),
    "it was deleted, and one of its name is there": ContainerSeen(
        (a_pod(uid=a_pod_uid(3), phase=Phase.RUNNING),), ended=True
    ),
    "it was deleted before the watch broke": ContainerSeen((), ended=True, stale=True),
    "it succeeded": ContainerSeen((a_pod(phase=Phase.SUCCEEDED),), ended=True),
    "it failed": ContainerSeen((a_pod(phase=Phase.FAILED),), ended=True),
    "the pods are not known yet": ContainerSeen((), ended=False, synced=False),
    "its init phase goes on": ContainerSeen(
        (a_pod(containers=(INIT, MAIN)),), ended=False, row=OF_INIT
    ),
    "its init phase is over": ContainerSeen(
        (a_pod(containers=past(INIT, MAIN), phase=Phase.RUNNING),), ended=True, row=OF_INIT
    ),
    "the kubelet decides": ContainerSeen(
        (),
        ended=False,
        row=msgspec.structs.replace(
            a_plain_row(), shares=(a_share(uuid=a_uuid(0), memory_mib=70000),)
        ),
    ),
}


def document(seen):
    inventory = an_inventory(gpus=[GPU])
    use = a_container_use(a_gpu_use(a_uuid(0)))
    made = facts(ledger=seen.ledger, pods=seen.table, inventory=inventory, used=lambda _: use)
    return status_of(made)


@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
async def test_every_face_shows_what_has_ended_and_the_sum_that_the_next_pod_meets(
    seen,
):
    mib = 60000 if seen.ended else 130000
    cells = cells_of(an_inventory(gpus=[GPU]), rows=seen.ledger.rows, pods=seen.table)
    found = document(seen)
    page = page_html(found, (), NOON)

    assert mib == promised(seen.ledger, seen.table, GPU).memory_mib
    assert {("", "0"): mib * 2**20} == await series(cells, "hami_agent_memory_promised_bytes")
    assert mib == found.gpus[0].promised_mib
    assert f"{mib / 1024:.1f}" in page

    (one,) = (each for each in found.allocations if each.shares[0].memory_mib == 70000)
    *_, last = pod_lines([one], NOON, StatusStyle(width=200))
    served = await series(cells, "hami_agent_container_memory_promised_bytes")
    assert seen.ended == one.ended == last.endswith("ended") == ("It has ended." in page)
    assert seen.ended == (one.shares[0].used_mib is None)
    is_named = seen.row.holder is not None and not seen.ended
    assert is_named == (70000 * 2**20 in served.values())

    # That nothing keeps its limits is said while it runs.
    off = tuple(msgspec.structs.replace(pod, runtime_class="kata") for pod in seen.pods)
    marked = {
        one.pod for one in document(dataclasses.replace(seen, pods=off)).allocations if one.unkept
    }
    knows = seen.row.key.pod_uid in seen.table.pods
    assert ({seen.row.pod} if knows and not seen.ended else set()) == marked


@pytest.mark.parametrize(("seen", "late"), [("it was deleted", 1), ("it runs", 2)])
def test_what_has_ended_is_not_waited_for(seen, late):
    """The kubelet confirms the answers of pods that are gone no more."""
    lines = status_lines(document(SEEN[seen]), NOON, StatusStyle(width=200))

    assert f"{late} not recorded by the kubelet" in " ".join(lines)
