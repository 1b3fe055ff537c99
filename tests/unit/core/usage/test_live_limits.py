"""Live limits: what an operator may change, and what HAMi-core's region lacks then."""

import msgspec
import pytest

from agent.core.cluster.pods import Phase, Role
from agent.core.inventory.share import Share
from agent.core.inventory.slices import MIB
from agent.core.state.ledger import Decider
from agent.core.usage.live_limits import (
    LimitRefused,
    LimitWish,
    find_row,
    limited,
    wanted_change,
)
from agent.core.usage.region import RegionChange, RegionReading, RegionState
from tests.builders import G1, G2, a_container, a_share, an_inventory
from tests.fakes.regions import a_region
from tests.unit.core.usage.limit_scene import a_limited_row, edits_of, facts_of, pod_of, using

BOTH = (a_share(uuid=G1), a_share(uuid=G2))


def refusal(ask) -> LimitRefused:
    with pytest.raises(LimitRefused) as caught:
        ask()
    return caught.value


@pytest.mark.parametrize(
    ("wish", "limits"),
    [
        (LimitWish("p1", memory_mib=4000), (4000, 30)),
        (LimitWish("p1", core_percent=70), (3000, 70)),
        (LimitWish("p1", memory_mib=100, core_percent=0), (100, 0)),
        (LimitWish("p1", memory_mib=10_000, core_percent=100), (10_000, 100)),
    ],
)
def test_what_has_room_is_granted_and_the_answer_stays(wish, limits):
    row = a_limited_row()

    new = limited(row, using(50), wish, facts_of(row))

    assert (Share(G1, *limits),) == new.live_limits == new.limits
    assert (row.shares, row.edits) == (new.shares, new.edits)


def test_one_gpu_of_several_is_limited_by_index_or_uuid_and_all_without():
    row = a_limited_row(1, *BOTH)

    def memory(gpu):
        wish = LimitWish("p1", gpu=gpu, memory_mib=500)
        return [one.memory_mib for one in limited(row, using(), wish, facts_of(row)).limits]

    assert [3000, 500] == memory("1") == memory(str(G2))
    assert [500, 500] == memory("")


def test_a_reset_gives_back_what_was_answered_and_is_held():
    row = a_limited_row()
    live = limited(row, using(), LimitWish("p1", memory_mib=9000), facts_of(row))

    back = limited(live, using(), LimitWish("p1", reset=True), facts_of(live))

    assert row.shares == back.live_limits
    assert row is limited(row, using(), LimitWish("p1", reset=True), facts_of(row))


@pytest.mark.parametrize("state", [RegionState.ABSENT, RegionState.UNREADABLE])
def test_a_reset_needs_no_region(state):
    row = msgspec.structs.replace(a_limited_row(), live_limits=(a_share(memory_mib=500),))

    back = limited(row, using(state=state), LimitWish("p1", reset=True), facts_of(row))

    assert row.shares == back.limits


@pytest.mark.parametrize(
    ("wish", "unknown", "words"),
    [
        (LimitWish("p11"), True, "No pod p11 holds a GPU of this node; did you mean p1?"),
        (LimitWish("web", "team-a"), True, "`hami-agent status` lists those that do."),
        (LimitWish("p1", "team-b"), True, "No pod p1"),
        (LimitWish("p1", container="x"), True, "No container x of pod team-a/p1 holds a GPU; "),
        (LimitWish("p2"), False, "several containers with GPUs; name one with --container: a, b."),
        (LimitWish("p9"), False, "Pod team-a/p9 has ended, or the agent has not read it"),
    ],
)
def test_who_is_not_there_or_not_meant_alone_is_told_with_the_names(wish, unknown, words):
    rows = a_limited_row(1), a_limited_row(2, container="a"), a_limited_row(2, container="b")
    ended = a_limited_row(9)
    pods = [*map(pod_of, rows), pod_of(ended, Phase.SUCCEEDED)]

    refused = refusal(lambda: find_row(wish, facts_of(*rows, ended, pods=pods)))

    assert unknown is refused.unknown
    assert words in str(refused)


def test_pods_of_one_name_are_told_apart_by_the_namespace():
    row, other = a_limited_row(1), a_limited_row(2, namespace="team-b")
    assert other.holder is not None
    other = msgspec.structs.replace(other, holder=msgspec.structs.replace(other.holder, pod="p1"))
    facts = facts_of(row, other)

    refused = refusal(lambda: find_row(LimitWish("p1"), facts))

    assert "name one of team-a/p1, team-b/p1." in str(refused)
    assert other is find_row(LimitWish("p1", "team-b"), facts)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"edits": edits_of()}, "without limits; in plain mode set plain.memoryLimits"),
        (
            {"edits": edits_of(3000, preload=False)},
            "switched HAMi-core off; create the pod without",
        ),
        ({"role": Role.INIT}, "is an init container; wait for its end"),
        (
            {"edits": edits_of(3000, envs=[("GPU_CORE_UTILIZATION_POLICY", "disable")])},
            "core limits disabled; leave out --cores",
        ),
    ],
)
def test_a_container_that_can_have_no_other_limits_is_refused(fields, words):
    row = a_limited_row(**fields)

    refused = refusal(lambda: find_row(LimitWish("p1", core_percent=1), facts_of(row)))

    assert not refused.unknown
    assert words in str(refused)


def test_another_plugins_answer_and_a_gpu_held_twice_are_refused():
    adopted = msgspec.structs.replace(a_limited_row(1), adopted=True)
    twice = a_limited_row(2, a_share(), a_share())
    facts = facts_of(adopted, twice)

    other = refusal(lambda: find_row(LimitWish("p1", memory_mib=1), facts))
    both = refusal(lambda: find_row(LimitWish("p2", memory_mib=1), facts))

    assert "was answered by another plugin" in str(other)
    assert "has one GPU twice" in str(both)


def test_memory_is_changed_although_core_limits_are_disabled():
    edits = edits_of(3000, envs=[("GPU_CORE_UTILIZATION_POLICY", "disable")])
    row = a_limited_row(edits=edits)

    assert row is find_row(LimitWish("p1", memory_mib=1), facts_of(row))


@pytest.mark.parametrize(
    ("use", "wish", "words"),
    [
        (using(), LimitWish("p1", gpu="1", memory_mib=1), "does not hold GPU 1; it holds 0."),
        (using(2000), LimitWish("p1", memory_mib=1999), "uses 2000 MiB of GPU 0 now"),
        (
            using(state=RegionState.ABSENT),
            LimitWish("p1", memory_mib=4000),
            "No process of this container has used its GPU through HAMi-core; try again once",
        ),
        (
            using(state=RegionState.UNREADABLE, reason="it is a link"),
            LimitWish("p1", memory_mib=4000),
            "region of this container cannot be used: it is a link.",
        ),
        (
            using(),
            LimitWish("p1", memory_mib=7001),
            "would have 10001 MiB of memory promised, and it has 10000 MiB; 4000 MiB are free: ",
        ),
        (
            using(),
            LimitWish("p1", core_percent=71),
            "GPU 0 would have 101 % of compute promised, and it has 100 %; 40 % are free",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(use, wish, words):
    row = a_limited_row()
    facts = facts_of(row, a_limited_row(2))

    refused = refusal(lambda: limited(row, use, wish, facts))

    assert words in str(refused)


def test_what_is_in_use_may_stay_and_be_raised_beyond():
    row = a_limited_row()

    assert (
        2000
        == limited(row, using(2000), LimitWish("p1", memory_mib=2000), facts_of(row))
        .limits[0]
        .memory_mib
    )
    assert (
        4000
        == limited(row, using(5000), LimitWish("p1", memory_mib=4000), facts_of(row))
        .limits[0]
        .memory_mib
    )


def test_on_an_oversold_gpu_a_limit_may_be_lowered_and_not_raised():
    row, other = a_limited_row(1), a_limited_row(2, a_share(memory_mib=9000))
    facts = facts_of(row, other)

    assert limited(row, using(), LimitWish("p1", memory_mib=2000), facts).live_limits
    refused = refusal(lambda: limited(row, using(), LimitWish("p1", memory_mib=3001), facts))
    assert "12001 MiB of memory promised, and it has 10000 MiB; 0 MiB are free" in str(refused)


def test_a_raised_limit_takes_the_room_of_the_others_and_a_lowered_one_frees_it():
    row, other = a_limited_row(1), a_limited_row(2)
    raised = limited(row, using(), LimitWish("p1", memory_mib=7000), facts_of(row, other))
    lowered = limited(row, using(), LimitWish("p1", memory_mib=1000), facts_of(row, other))
    more = LimitWish("p2", memory_mib=9000)

    refused = refusal(lambda: limited(other, using(), more, facts_of(raised, other)))

    assert "16000 MiB" in str(refused)
    assert 9000 == limited(other, using(), more, facts_of(lowered, other)).limits[0].memory_mib


def test_a_pod_takes_the_greater_of_its_init_and_app_containers():
    init = a_limited_row(1, a_share(memory_mib=8000), container="init", role=Role.INIT)
    app = a_limited_row(1)
    pod = pod_of(app, containers=[a_container(name="init", role=Role.INIT), a_container()])
    facts = facts_of(init, app, a_limited_row(2, a_share(memory_mib=2000)), pods=[pod])

    assert limited(app, using(), LimitWish("p1", memory_mib=8000), facts).live_limits
    refusal(lambda: limited(app, using(), LimitWish("p1", memory_mib=10_001), facts))


def test_the_pods_of_rows_that_nobody_closed_yet_take_no_room():
    row, gone = a_limited_row(1), a_limited_row(2, a_share(memory_mib=9000))

    new = limited(
        row, using(), LimitWish("p1", memory_mib=9000), facts_of(row, gone, pods=[pod_of(row)])
    )

    assert 9000 == new.limits[0].memory_mib


def test_a_gpu_that_is_gone_is_told():
    row = a_limited_row()
    facts = facts_of(row, gpus=an_inventory(count=0))

    refused = refusal(lambda: limited(row, using(), LimitWish("p1", memory_mib=1), facts))
    held = refusal(lambda: limited(row, using(), LimitWish("p1", gpu="7", memory_mib=1), facts))

    assert "is not on this node any more; delete the pod." in str(refused)
    assert f"it holds {G1}." in str(held)


def test_in_plain_mode_a_limit_stays_within_the_containers_slices():
    row = msgspec.structs.replace(a_limited_row(), decided_by=Decider.KUBELET)
    facts = facts_of(row, pods=[])

    refused = refusal(lambda: limited(row, using(), LimitWish("p1", memory_mib=3001), facts))

    assert row is find_row(LimitWish("p1"), facts)
    assert "choose at most 3000 MiB." in str(refused)
    assert 500 == limited(row, using(), LimitWish("p1", memory_mib=500), facts).limits[0].memory_mib


def test_of_a_share_of_all_memory_a_part_can_be_left():
    row = a_limited_row(1, a_share(memory_mib=0))
    facts = facts_of(row)

    lowered = limited(row, using(7000), LimitWish("p1", memory_mib=7000), facts)

    refusal(lambda: limited(row, using(7000), LimitWish("p1", memory_mib=6999), facts))
    assert 7000 == lowered.limits[0].memory_mib


def reading(*pairs: tuple[int, int]) -> RegionReading:
    region = a_region(*(G1, G2)[: len(pairs)])
    gpus = tuple(
        msgspec.structs.replace(gpu, memory_limit=mib * MIB, core_limit=cores)
        for gpu, (mib, cores) in zip(region.gpus, pairs, strict=True)
    )
    return RegionReading(RegionState.READABLE, msgspec.structs.replace(region, gpus=gpus))


LIVE = msgspec.structs.replace(
    a_limited_row(1, *BOTH),
    live_limits=(a_share(uuid=G1, memory_mib=500, core_percent=0), a_share(uuid=G2)),
)


@pytest.mark.parametrize(
    ("row", "found", "change"),
    [
        (LIVE, reading((500, 100), (3000, 30)), None),
        (LIVE, reading((500, 400), (3000, 30)), None),
        (
            LIVE,
            reading((3000, 30), (3000, 30)),
            RegionChange(memory_limits=((0, 500 * MIB),), core_limits=((0, 100),)),
        ),
        (LIVE, reading((500, 100), (0, 30)), RegionChange(memory_limits=((1, 3000 * MIB),))),
        (LIVE, reading((500, 100), (3000, 100)), RegionChange(core_limits=((1, 30),))),
        (
            LIVE,
            reading(),
            RegionChange(
                memory_limits=((0, 500 * MIB), (1, 3000 * MIB)), core_limits=((0, 100), (1, 30))
            ),
        ),
        (LIVE, RegionReading(RegionState.ABSENT), None),
        (a_limited_row(), reading((1, 1)), None),
    ],
    ids=[
        "as it should be",
        "more than 100 is no limit, too",
        "the first",
        "a process without limits was first",
        "cores alone",
        "no GPU is listed yet",
        "no region",
        "nobody has set limits",
    ],
)
def test_a_region_that_differs_is_written(row, found, change):
    assert change == wanted_change(row, found)


def test_what_was_all_memory_is_written_as_it_was_answered():
    row = a_limited_row(1, a_share(memory_mib=0))
    row = msgspec.structs.replace(row, live_limits=row.shares)

    assert RegionChange(memory_limits=((0, 10_000 * MIB),)) == wanted_change(row, reading((5, 30)))
