"""The condition GpuDegraded follows from the inventory."""

import datetime as dt

from agent.health.news import TEXT_LIMIT, gpu_degraded
from agent.model import NO_INDEX, Condition, Inventory
from tests.builders import NOON, a_gpu, a_health, a_shared_gpu, a_uuid, an_inventory

LATER = NOON + dt.timedelta(hours=1)


def test_a_node_whose_gpus_are_all_served_is_not_degraded():
    found = gpu_degraded(an_inventory(count=2), LATER)

    assert ("GpuDegraded", False, "all 2 GPUs are served", NOON) == (
        found.kind,
        found.status,
        found.message,
        found.since,
    )


def test_a_node_without_gpus_is_not_degraded():
    found = gpu_degraded(Inventory(), LATER)

    assert (False, "there are no GPUs to share", LATER) == (
        found.status,
        found.message,
        found.since,
    )


def test_a_gpu_that_is_not_served_degrades_the_node_and_is_named():
    ill = a_health(condition=Condition.BAD, since=LATER, text="XID 48 [H-048]")
    gpus = (
        a_shared_gpu(),
        a_shared_gpu(gpu=a_gpu(index=1), health=ill),
        a_shared_gpu(gpu=a_gpu(index=2), present=False, there=False),
    )
    found = gpu_degraded(an_inventory(gpus=gpus), LATER)

    assert (True, LATER) == (found.status, found.since)
    assert (
        f"GPU 1 ({a_uuid(1)}) is bad: XID 48 [H-048]; "
        f"GPU 2 ({a_uuid(2)}) is not on the node any more"
    ) == found.message


def test_a_gpu_of_unknown_index_is_called_that():
    gone = a_shared_gpu(gpu=a_gpu(index=NO_INDEX, uuid=a_uuid(9)), present=False, there=False)

    assert gpu_degraded(an_inventory(gpus=(gone,)), LATER).message.startswith(
        f"GPU of unknown index ({a_uuid(9)}) is"
    )


def test_the_message_has_a_bound():
    ill = a_health(condition=Condition.BAD, text="x" * 300)
    gpus = [a_shared_gpu(gpu=a_gpu(index=n), health=ill) for n in range(16)]

    assert TEXT_LIMIT == len(gpu_degraded(an_inventory(gpus=gpus), LATER).message)


def test_a_gpu_that_is_filtered_out_while_it_is_held_degrades_nothing():
    kept = a_shared_gpu(gpu=a_gpu(index=1), present=False, wanted=False)

    found = gpu_degraded(an_inventory(gpus=(a_shared_gpu(), kept)), LATER)

    assert (False, "the only GPU is served") == (found.status, found.message)


def test_a_gpu_that_is_only_not_described_degrades_the_node_from_now_on():
    unseen = a_gpu(uuid=a_uuid(1), index=NO_INDEX, name="")
    kept = a_shared_gpu(gpu=unseen, present=False, obstacle="no answer in time")

    found = gpu_degraded(an_inventory(gpus=(a_shared_gpu(), kept)), LATER)

    assert (True, LATER) == (found.status, found.since)
    assert f"GPU of unknown index ({a_uuid(1)}) is not shared: no answer in time" == found.message
