"""Room on a GPU: Kubernetes' arithmetic, and never more than is registered."""

import msgspec
import pytest

from agent.allocate.room import GpuUse, RoomClaim, gpu_use, pod_use, promised, scheduled, shortage
from agent.cluster import Phase, PodTable, Role
from agent.ledger import Ledger
from agent.model import Share
from tests.builders import G1, G2, a_gpu, a_pod, a_pod_uid, a_row, a_share, a_shared_gpu

GPU = a_shared_gpu(gpu=a_gpu(uuid=G1), registered_mib=1000, core_percent=100)
OTHER = a_shared_gpu(gpu=a_gpu(uuid=G2), registered_mib=1000, core_percent=100)
GPUS = {G1: GPU, G2: OTHER}


def claim(pod: int = 1, role: Role = Role.APP, mib: int = 100, percent: int = 10) -> RoomClaim:
    share = a_share(uuid=G1, memory_mib=mib, core_percent=percent)
    return RoomClaim(a_pod_uid(pod), role, (share,))


def test_init_containers_count_by_their_peak_and_no_memory_means_all_of_it():
    inits = [claim(role=Role.INIT, mib=500, percent=1), claim(role=Role.INIT, mib=1, percent=50)]

    assert GpuUse(500, 50) == pod_use([*inits, claim(mib=100)], GPU)
    assert GpuUse(1000, 10) == pod_use([claim(mib=0)], GPU)


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("i20 s10 a5", 20),
        ("s10 i20 s7 a5", 30),
        ("s0 i20 s10 a15", 25),
        ("s5 i20 s10 i30 a1 a2", 45),
        ("i10 s5 i2 a30 a4", 39),
        ("s1 s2 s4 i8", 15),
        ("s3", 3),
    ],
)
def test_a_sidecar_runs_beside_what_starts_after_it_in_whatever_order_they_come(text, mib):
    """As AggregateContainerRequests of k8s.io/component-helpers sums them up."""
    roles = {"s": Role.SIDECAR, "i": Role.INIT, "a": Role.APP}
    claims = [
        RoomClaim(
            a_pod_uid(1), roles[word[0]], (Share(G1, int(word[1:]), 0),) * (word[1:] != "0"), place
        )
        for place, word in enumerate(text.split())
    ]

    assert mib == pod_use(claims, GPU).memory_mib == pod_use(claims[::-1], GPU).memory_mib


def test_limits_that_an_earlier_version_set_count_until_the_row_goes():
    row = a_row(shares=[a_share(uuid=G1, memory_mib=100)])
    raised = msgspec.structs.replace(row, live_limits=(Share(G1, 700, 40),))

    table = PodTable(pods={row.key.pod_uid: a_pod(phase=Phase.RUNNING)}, synced=True)

    assert GpuUse(700, 40) == promised(Ledger((raised,)), table, GPU)
    assert GpuUse(700, 40) == gpu_use(filter(None, [scheduled(raised, None)]), GPU)


def test_what_just_fits_fits_and_one_more_does_not():
    live = [claim(1, mib=400, percent=50), claim(2, mib=500, percent=30)]

    assert None is shortage(claim(3, mib=100, percent=20), live, GPUS)
    memory = shortage(claim(3, mib=101, percent=20), live, GPUS)
    cores = shortage(claim(3, mib=100, percent=21), live, GPUS)
    assert memory is not None
    assert cores is not None
    assert (True, 1001) == (memory.memory, memory.total.memory_mib)
    assert (False, 101) == (cores.memory, cores.total.core_percent)
