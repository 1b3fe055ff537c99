"""Plain mode's answers: the ids decide; what cannot be given is refused with its reason."""

import pytest

from agent.allocate.plain import grant
from agent.errors import Refusal, RefusalReason
from agent.model import Condition, SliceId, slice_id
from tests.builders import a_gpu, a_health, a_shared_gpu, an_inventory
from tests.unit.core.allocation.plain_scene import ids
from tests.unit.core.allocation.refusals import check_refusal

G0 = a_gpu(index=0)
MANY = 10_000
SPLIT = an_inventory(gpus=[a_shared_gpu(gpu=G0, split_count=MANY)])
ALL = tuple(slice_id(G0.uuid, number) for number in range(MANY))


@pytest.mark.parametrize(
    ("wanted", "inventory", "held", "mib"),
    [
        (ids(3), an_inventory(), (), 8155),
        (ids(3, 7, 0), an_inventory(), (), 3 * 8155),
        (ids(10), an_inventory(), ids(10), 8155),  # the split count was lowered since
        (ALL, SPLIT, (), MANY * 8),
    ],
)
def test_slices_of_a_gpu_are_equal_parts_of_its_memory(wanted, inventory, held, mib):
    (granted,) = grant(wanted, inventory, held)
    assert (G0.uuid, mib, 0) == (
        granted.share.uuid,
        granted.share.memory_mib,
        granted.share.core_percent,
    )


def test_the_gpus_are_in_the_order_of_their_pci_bus_ids_whatever_the_kubelets_order():
    first = a_shared_gpu(gpu=a_gpu(index=0, pci="0000:90:00.0"))
    second = a_shared_gpu(gpu=a_gpu(index=1, pci="0000:10:00.0"))
    inventory = an_inventory(gpus=(first, second))
    for wanted in ((*ids(1), *ids(2, gpu=1)), (*ids(2, gpu=1), *ids(1))):
        assert [second.uuid, first.uuid] == [one.share.uuid for one in grant(wanted, inventory, ())]


def test_a_slice_is_never_of_0_mib_which_would_mean_all():
    tiny = an_inventory(gpus=(a_shared_gpu(gpu=G0, registered_mib=9, split_count=10),))
    assert [1] == [one.share.memory_mib for one in grant(ids(0), tiny, ())]


def on(condition, *, present=True, serving=False):
    """The first GPU in that condition."""
    health = a_health(condition=condition, serving=serving)
    return an_inventory(gpus=(a_shared_gpu(gpu=G0, health=health, present=present),))


AGAIN = "create the pod again"
FILTERED = on(Condition.OK, present=False, serving=True)
REFUSED = {
    "of no GPU here": (ids(0, gpu=7), RefusalReason.UNKNOWN_GPU, "does not share", AGAIN),
    "beyond the split count": (ids(10), RefusalReason.UNKNOWN_SLICE, "has only 10 slices", AGAIN),
    **{
        f"no id: {text[:3]!r}": (
            (SliceId(text),),
            RefusalReason.UNKNOWN_SLICE,
            ", no id of a slice",
            "an operator has to",
        )
        for text in ("", "GPU", "-", "x-01", "x--", "\n", "é", "x" * 5000)
    },
}


@pytest.mark.parametrize(("wanted", "gate", "wrong", "todo"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_slice_here_is_refused_in_one_short_line(wanted, gate, wrong, todo):
    with pytest.raises(Refusal) as caught:
        grant(wanted, an_inventory(), ())
    check_refusal(caught.value, gate, wrong=wrong, todo=todo)
    assert len(caught.value.sentence) < 300


@pytest.mark.parametrize(
    ("inventory", "gate", "words"),
    [
        (on(Condition.BAD), RefusalReason.BAD_GPU, "is bad: "),
        (on(Condition.LOST), RefusalReason.BAD_GPU, "is lost: "),
        (FILTERED, RefusalReason.BAD_GPU, "is filtered out by the settings; create the pod"),
        (on(Condition.UNMONITORED), RefusalReason.DRIVER_UNRESPONSIVE, "an operator has to"),
    ],
)
def test_a_gpu_that_does_not_serve_is_refused(inventory, gate, words):
    with pytest.raises(Refusal, match=words) as caught:
        grant(ids(0), inventory, ())
    assert gate is caught.value.gate
    for condition in (Condition.UNMONITORED, Condition.WATCH):
        assert 1 == len(grant(ids(0), on(condition, serving=True), ()))
