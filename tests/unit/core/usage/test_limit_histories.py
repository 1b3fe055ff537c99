"""Whatever is answered, limited and ended in any order: no GPU is promised more than it has."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from agent.core.allocation.room import claim_of, gpu_use, shortage
from agent.core.inventory.share import Share
from agent.core.state.ledger import Ledger
from agent.core.usage.live_limits import LimitFacts, LimitRefused, LimitWish, find_row, limited
from tests.builders import G1, G2
from tests.unit.core.usage.limit_scene import GPUS, a_limited_row, facts_of, using

BY_UUID = {gpu.uuid: gpu for gpu in GPUS.gpus}
PODS = st.integers(0, 5)
MIB = st.integers(1, 12_000)
CORES = st.integers(0, 100)
ANSWERS = st.tuples(st.just("answer"), PODS, st.sampled_from(["", "0", "1"]), MIB, CORES)
LIMITS = st.tuples(
    st.just("limit"), PODS, st.sampled_from(["", "0", "1"]), MIB | st.none(), CORES | st.none()
)
RESETS = st.tuples(st.just("reset"), PODS, st.sampled_from(["", "0", "1"]), st.none(), st.none())
ENDS = st.tuples(st.just("end"), PODS, st.just(""), st.none(), st.none())


def scene_of(ledger: Ledger) -> LimitFacts:
    return facts_of(*ledger.rows)


def answered(ledger: Ledger, pod: int, gpu: str, mib: int, cores: int) -> Ledger:
    """The ledger with the pod's row, if the pod is new and its shares fit as for an Allocate."""
    uuids = [uuid for uuid, label in ((G1, "0"), (G2, "1")) if gpu in {"", label}]
    row = a_limited_row(pod, *(Share(uuid, mib, cores) for uuid in uuids))
    live = map(claim_of, ledger.rows)
    fits = ledger.find(row.key) is None and shortage(claim_of(row), live, BY_UUID) is None
    return ledger.put(row) if fits else ledger


@given(st.lists(ANSWERS | LIMITS | RESETS | ENDS, max_size=30))
def test_no_gpu_is_ever_promised_beyond_what_is_registered(history):
    ledger = Ledger()
    for kind, pod, gpu, mib, cores in history:
        before, key = ledger, a_limited_row(pod).key
        if kind == "answer":
            ledger = answered(ledger, pod, gpu, mib, cores)
        elif kind == "end":
            ledger = ledger.drop([key])
        else:
            wish = LimitWish(
                f"p{pod}", gpu=gpu, memory_mib=mib, core_percent=cores, reset=kind == "reset"
            )
            try:
                row = find_row(wish, scene_of(ledger))
                ledger = ledger.put(limited(row, using(), wish, scene_of(ledger)))
            except LimitRefused:
                assert before == ledger
        for shared in GPUS.gpus:
            use = gpu_use(map(claim_of, ledger.rows), shared)
            assert use.memory_mib <= shared.registered_mib
            assert use.core_percent <= shared.core_percent


@given(st.lists(LIMITS, max_size=10))
def test_whatever_was_set_a_reset_leaves_the_answer_in_force(wishes):
    row = a_limited_row(1)
    for _, _, gpu, mib, cores in wishes:
        wish = LimitWish("p1", gpu=gpu, memory_mib=mib, core_percent=cores)
        try:
            row = limited(row, using(), wish, facts_of(row))
        except LimitRefused:
            continue

    back = limited(row, using(), LimitWish("p1", reset=True), facts_of(row))

    assert row.shares == back.limits
    assert msgspec.structs.replace(row, live_limits=()) == msgspec.structs.replace(
        back, live_limits=()
    )
