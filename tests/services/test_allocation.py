"""Durable before answered, one pod per call; who was answered before gets the same bytes again."""

import asyncio
import errno
import sys
from collections import Counter
from types import FrameType

import msgspec
import pytest
from structlog.testing import capture_logs

from agent.allocate.service import (
    API_BUDGET,
    DISK_BUDGET,
    KUBELET_BUDGET,
    LIST_PAUSE,
    LOCK_PAUSE,
    OWNER_BUDGET,
    USED_LOCKS,
    WAIT_BURST,
    WAIT_REFILL,
)
from agent.cluster import NodeView, Phase, PodTable, Role
from agent.errors import KubeletError, Refusal, RefusalReason, StateError
from agent.kit.timing import MOST, WINDOW
from agent.ledger import KubeletEpoch, mismatch
from agent.reconcile import THROTTLED_PAUSE, Adoption
from agent.state import CURRENT
from agent.witness import CALL_DEADLINE
from tests.builders import NODE, a_container, a_lock, a_row
from tests.machine.sides import starved, virtual
from tests.services.allocating import G1, G2, NEXT_EPOCH, Desk, a_desk, fill, ids, placed
from tests.unit.core.allocation.refusals import check_refusal
from tests.unit.core.allocation.test_matching_gates import DECIDED
from tests.unit.core.allocation.test_plain import REFUSED as PLAIN


async def outcome(desk, *numbers):
    """What the kubelet gets for these ids: edits, or a refusal."""
    try:
        return await desk.service.allocate(ids(*numbers))
    except Refusal as refusal:
        return refusal


@pytest.mark.parametrize(
    ("is_bound_then", "gate"),
    [(False, RefusalReason.NO_POD_ADMITTED), (True, RefusalReason.MEMORY_EXCEEDED)],
    ids=["it is no candidate for the next call", "it takes room already"],
)
async def test_until_a_row_is_on_disk_there_is_no_answer_and_its_pod_counts(is_bound_then, gate):
    text = f"{G1},NVIDIA,60000,10:;"
    async with a_desk() as desk:
        pod = desk.bind(placed(1, text))
        desk.disk.gate.clear()
        async with asyncio.TaskGroup() as group:
            answering = group.create_task(outcome(desk, 4))
            await asyncio.sleep(0.01)
            if is_bound_then:
                desk.bind(placed(2, text))
            assert gate is (await outcome(desk, 5)).gate
            assert (False, ()) == (answering.done(), desk.ledger.rows)
            # An Event on the Node tells a refusal that no pod can show.
            told = [] if is_bound_then else [("AllocationRefused", True, "")]
            assert told == [(one.reason, one.warning, one.pod) for one in desk.said]
            desk.disk.gate.set()

        assert [pod.uid] == [row.key.pod_uid for row in desk.ledger.rows]
    wrong, todo = "several containers at once", "asks again in a few seconds"
    check_refusal(answering.result(), RefusalReason.OVERLAP, wrong=wrong, todo=todo)


async def test_a_replay_that_was_overtaken_is_refused_when_no_other_call_is_under_way():
    """Before, the kubelet would ask for it again beside that one."""
    ended = []
    async with a_desk() as desk:
        desk.bind(placed(1))
        await desk.service.allocate(ids(4))
        await asyncio.sleep(1)
        desk.disk.gate.clear()

        async def call(number):
            ended.append((number, type(await outcome(desk, number)).__name__))

        async with asyncio.TaskGroup() as group:
            group.create_task(call(4))
            await asyncio.sleep(0.01)
            desk.bind(placed(2))
            group.create_task(call(5))
            await asyncio.sleep(0.01)
            desk.disk.gate.set()

    assert [(5, "ContainerEdits"), (4, "Refusal")] == ended


SHARE = f"{G1},NVIDIA,1,1:;"


@pytest.mark.parametrize(
    "asked",
    [
        (f"{G1}-0", f"{G1}-0"),
        (f"{G2}-1", f"{G2}-2"),
        ("GPU-elsewhere-7", "no slice"),
        ("MIG-unknown", ""),
        (f"{G1}-99999999999999999999", f"{G1}--1"),
    ],
    ids=["twice the same, and held", "of another GPU", "unknown", "MIG and empty", "no numbers"],
)
async def test_odd_ids_are_only_counted_and_a_refusal_writes_nothing(asked):
    text = f"{G2},NVIDIA,100,1:{G1},NVIDIA,200,2:;"
    async with a_desk() as desk:
        desk.bind(placed(1))
        await desk.service.allocate(ids(0))
        desk.bind(placed(2, text, containers=(a_container(count=3),)))
        before = desk.ledger, dict(desk.hooks.made), await desk.disk.content(CURRENT)
        with pytest.raises(Refusal):
            await desk.service.allocate(asked)
        assert before == (desk.ledger, desk.hooks.made, await desk.disk.content(CURRENT))

        desk.bind(placed(2, text, containers=(a_container(count=2),)))
        envs = dict((await desk.service.allocate(asked)).envs)

        assert (f"{G1},{G2}", "200m") == (
            envs["NVIDIA_VISIBLE_DEVICES"],
            envs["CUDA_DEVICE_MEMORY_LIMIT_0"],
        )
        assert tuple(sorted(asked)) == desk.ledger.rows[-1].slice_ids


async def test_a_container_is_adopted_with_its_own_group_and_answered_when_the_kubelet_asks():
    two = (a_container(name="a"), a_container(name="b"))
    pod = placed(1, SHARE + f"{G2},NVIDIA,2,2:;", containers=two, phase=Phase.RUNNING)
    async with a_desk() as desk:
        row = await desk.service.adopt(Adoption(pod, two[1], ids(3)))
        assert row is not None
        assert (1, G2, True) == (row.group, row.shares[0].uuid, row.confirmed)
        lost = await desk.service.adopt(Adoption(pod, two[0], ()))
        assert lost is not None
        assert (False, KubeletEpoch()) == (lost.confirmed, lost.epoch)
        await desk.state.commit(lambda ledger: ledger.put(row, lost))
        desk.witness.admit(pod, b=ids(3)[0])
        desk.see(pod)

        assert lost.edits == await desk.service.allocate(ids(9))
        assert {("replay", ""): 1} == desk.results


@pytest.mark.parametrize(
    ("text", "container", "hanging"),
    [
        ("GPU-elsewhere,NVIDIA,1,1:;", "main", ""),
        (SHARE * 2, "main", ""),
        (SHARE, "main", "facts"),
        (SHARE, "other", ""),
    ],
    ids=["no GPU of this node", "other groups", "a hook path that hangs", "nothing was written"],
)
async def test_a_holder_that_cannot_be_understood_is_not_adopted_and_held_up_nobody(
    text, container, hanging
):
    async with a_desk() as desk:
        desk.hooks.hanging = hanging
        found = Adoption(placed(1, text), a_container(name=container), ids(3))

        async with asyncio.timeout(60):
            assert None is await desk.service.adopt(found)


async def test_a_second_answer_is_equal_and_its_row_is_the_new_kubelets():
    """The kubelet lost its record and was restarted. The directory is left as it is."""
    async with a_desk() as desk:
        pod = desk.bind(placed(1))
        first = await desk.service.allocate(ids(4))
        booked = msgspec.structs.replace(desk.ledger.rows[0], confirmed=True)
        await desk.state.commit(lambda ledger: ledger.put(booked))
        desk.lock(None)
        desk.epoch = NEXT_EPOCH
        desk.hooks.missing = ("/usr/local/vgpu/libvgpu.so",)  # which refuses only new answers
        await asyncio.sleep(90)

        assert first == await desk.service.allocate(ids(9))

        (row,) = desk.ledger.rows
        assert (ids(9), NEXT_EPOCH, False) == (row.slice_ids, row.epoch, row.confirmed)
        assert desk.clock.now() == row.answered_at
        directory = f"{pod.uid}_main"
        assert (1, 2) == (desk.hooks.wiped[directory], desk.hooks.made[directory])
        assert {("ok", ""): 1, ("replay", ""): 1} == desk.results


async def test_a_container_runs_as_its_status_says_where_no_cgroup_tells():
    """Both lost their records, and the kubelet asks for the one that does not run."""
    two = tuple(a_container(name=name) for name in "ab")
    pod = placed(1, SHARE + f"{G2},NVIDIA,2,2:;", containers=two)
    async with a_desk() as desk:
        desk.bind(pod)
        await desk.service.allocate(ids(1))
        desk.witness.admit(pod, a=ids(1)[0])
        second = await desk.service.allocate(ids(2, gpu=1))
        desk.lock(None)
        desk.epoch = NEXT_EPOCH
        first, other = (msgspec.structs.replace(one, has_run=True) for one in two)
        ran = (msgspec.structs.replace(first, running_id="a"), other)
        desk.admit(msgspec.structs.replace(pod, phase=Phase.RUNNING, containers=ran))
        desk.containers.alive = None
        await asyncio.sleep(60)

        assert second == await desk.service.allocate(ids(9))


# HAMi 2.10 counts a sidecar as an init container, so it places more than fits.


def a_pod_of(number, text):
    """A pod such as `s30000 a30000`: sidecars, init containers and apps, each with its MiB."""
    roles = {"s": Role.SIDECAR, "i": Role.INIT, "a": Role.APP}
    words = text.split()
    boxes = [a_container(name=f"{one[0]}{n}", role=roles[one[0]]) for n, one in enumerate(words)]
    groups = "".join(f"{G1},NVIDIA,{word[1:]},1:;" for word in words)
    return placed(number, groups, containers=tuple(boxes))


async def run(desk, pod):
    """The kubelet admits the whole pod. Raises Refusal."""
    desk.bind(pod)
    held = {}
    for one in pod.containers:
        wanted = ids(len(desk.ledger.rows))
        await desk.service.allocate(wanted)
        desk.records.keys = frozenset(row.key for row in desk.ledger.rows)
        held |= {one.name: wanted[0]} if one.role is not Role.INIT else {}
        desk.witness.admit(pod, **held)


@pytest.mark.parametrize(
    ("pods", "refused", "text"),
    [
        (["s30000 a30000"] * 2, False, "has given out 120000 MiB of memory of GPU 0"),
        (["s30000 i40000 a1000"] * 2, False, "has given out 140000 MiB of memory of GPU 0"),
        (["s50000 a50000"], True, "let its containers ask for less"),
        (["i1 s50000 a50000"], True, "let its containers ask for less"),
        (["s40000 a40000", "a50000"], True, "130000 MiB of memory promised, and has 81559"),
    ],
)
async def test_what_hami_places_beyond_the_gpu_is_served_and_told_and_refused_if_it_counts_it_too(
    pods, refused, text
):
    async with a_desk() as desk:
        *before, last = [a_pod_of(number, words) for number, words in enumerate(pods, 1)]
        for pod in before:
            await run(desk, pod)
        assert [] == desk.said
        if refused:
            with pytest.raises(Refusal, match=text) as caught:
                await run(desk, last)
            assert RefusalReason.MEMORY_EXCEEDED is caught.value.gate
            assert len(before) == desk.refreshes
        else:
            await run(desk, last)
            event = desk.said[-1]
            assert ("GpuOversold", True) == (event.reason, event.warning)
            assert all(word in event.text for word in (text, "which has 81559 MiB", "sidecars"))


async def test_a_pod_that_truly_fits_is_served_although_hami_counts_a_peak_that_is_over():
    """For HAMi 2.10 the init phase never ends with a sidecar."""
    async with a_desk() as desk:
        pod = a_pod_of(1, "i60000 s1000 a10000")
        await run(desk, pod)
        ran = [
            msgspec.structs.replace(one, has_run=True, succeeded=one.role is Role.INIT)
            for one in pod.containers
        ]
        desk.see(msgspec.structs.replace(pod, phase=Phase.RUNNING, containers=tuple(ran)))
        await run(desk, a_pod_of(2, "a70000"))

        assert ([], 4) == (desk.said, len(desk.ledger.rows))


# What the outside world does not say in time, or cannot take, becomes a refusal.


async def refused(desk, gate, count=1):
    with pytest.raises(Refusal) as caught:
        await desk.service.allocate(ids(*range(count)))
    assert gate is caught.value.gate
    assert {("refused", gate.name.lower()): 1} == {
        key: count for key, count in desk.results.items() if key[0] == "refused"
    }
    return caught.value


def elapsed():
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("trouble", "asked", "took"),
    [
        *(({"delay": seconds}, 1, seconds) for seconds in (0.9, 1.5, 4.0)),
        ({"throttled": 3}, 4, 3 * THROTTLED_PAUSE),
        ({"failures": [KubeletError("connection lost")]}, 2, None),
    ],
    ids=["slow", "slower", "slowest", "over its rate limit", "one lost connection"],
)
async def test_a_kubelet_that_answers_late_or_at_the_next_try_costs_no_pod(trouble, asked, took):
    """The client gives a slow answer up no sooner than the budget ends."""
    async with a_desk() as desk:
        desk.bind(placed(1))
        vars(desk.witness).update(trouble)
        began = elapsed()

        await desk.service.allocate(ids(1))

        assert KUBELET_BUDGET <= CALL_DEADLINE
        assert asked == len(desk.witness.asked)
        assert took is None or took == pytest.approx(elapsed() - began)
        assert 1 == len(desk.ledger.rows)


@pytest.mark.parametrize(
    ("synced", "stale", "held"),
    [(False, False, API_BUDGET), (True, True, API_BUDGET), (True, False, OWNER_BUDGET)],
    ids=["it never answered", "its watch is down", "its watch is open"],
)
async def test_an_api_server_that_hangs_is_waited_for_as_long_as_it_may_still_tell(
    synced, stale, held
):
    async with a_desk() as desk:
        desk.pods.set(PodTable(synced=synced, stale=stale))
        desk.silent = asyncio.Event()
        began = elapsed()

        await refused(desk, RefusalReason.PODS_UNKNOWN)

        assert held == pytest.approx(elapsed() - began)


@pytest.mark.parametrize(("synced", "asked"), [(False, 2), (True, 1)])
async def test_the_first_list_of_all_may_have_begun_before_the_call(synced, asked):
    async with a_desk() as desk:
        desk.pods.set(PodTable(synced=synced))

        await refused(desk, RefusalReason.NO_POD_ADMITTED)

        assert asked == desk.refreshes


async def test_an_api_server_that_hangs_holds_the_kubelet_for_few_pods_that_nobody_knows():
    async with a_desk() as desk:
        desk.silent = asyncio.Event()
        began = elapsed()
        for _ in range(100):
            with pytest.raises(Refusal):
                await desk.service.allocate(ids(0))

        waits = WAIT_BURST + (elapsed() - began) / WAIT_REFILL
        assert 100 * LIST_PAUSE + waits * OWNER_BUDGET >= elapsed() - began


async def test_a_lock_that_another_pod_used_up_is_no_right_where_the_node_cannot_be_read():
    async with a_desk() as desk:
        first = placed(1, reusable_name=False)
        desk.bind(first)
        await desk.service.allocate(ids(0))
        desk.bury(first)
        desk.witness.forget(first)
        text = f"{G2},NVIDIA,80000,100:;"
        forged = placed(1, text, uid=placed(9).uid, reusable_name=False)
        desk.admit(forged)
        desk.silent = asyncio.Event()

        await refused(desk, RefusalReason.PODS_UNKNOWN)


async def test_of_the_locks_that_pods_were_answered_under_the_newest_are_remembered():
    async with a_desk() as desk:
        desk.service.used_locks = {f"lock {n}": placed(n).uid for n in range(USED_LOCKS)}
        desk.bind(placed(1))
        await desk.service.allocate(ids(0))

        assert USED_LOCKS == len(desk.service.used_locks)
        assert desk.ledger.rows[0].lock in desk.service.used_locks


async def waste(desk, number):
    """A pod that nobody placed is refused; the seconds that the kubelet was held for it."""
    stray = placed(number, annotations={})
    desk.admit(stray)
    began = elapsed()
    await desk.service.prefer(ids(0, 1), (), 1)
    with pytest.raises(Refusal):
        await desk.service.allocate(ids(0))
    desk.see(msgspec.structs.replace(stray, phase=Phase.FAILED))
    desk.witness.forget(stray)
    return elapsed() - began


async def test_however_many_stray_pods_come_they_hold_the_kubelet_for_a_moment_only():
    async with a_desk() as desk:
        held = [await waste(desk, number) for number in range(100, 200)]

        assert WAIT_BURST * LOCK_PAUSE >= sum(held)
        assert 0 == pytest.approx(sum(held[WAIT_BURST:]))
        await asyncio.sleep(WAIT_REFILL)
        assert 0 < await waste(desk, 200)


@virtual
async def test_stray_pods_are_waited_for_no_longer_where_the_agent_gets_little_cpu():
    async with a_desk() as desk, starved(0.1):
        began = elapsed()
        for number in range(100, 200):
            await waste(desk, number)
        took = elapsed() - began

    waits = WAIT_BURST + took / WAIT_REFILL
    assert waits * LOCK_PAUSE + MOST * (1 + took / WINDOW) >= took


async def test_among_stray_pods_a_lock_that_the_watch_shows_late_is_read_at_once():
    async with a_desk() as desk:
        for number in range(100, 120):
            await waste(desk, number)
        pod = placed(1)
        desk.admit(pod)
        text = a_lock(namespace=pod.namespace, name=pod.name).value
        desk.unseen_node = NodeView(NODE, "uid", "2", {"hami.io/mutex.lock": text})
        began = elapsed()

        await desk.service.allocate(ids(0))

        assert 0 == pytest.approx(elapsed() - began)
        assert [pod.uid] == [row.key.pod_uid for row in desk.ledger.rows]


async def test_a_pod_that_ran_is_served_though_it_was_refused_while_the_view_was_late():
    async with a_desk() as desk:
        pod = placed(1)
        desk.bind(pod)
        desk.disk.faults.fail_at(0, errno.ENOSPC, times=50)
        await refused(desk, RefusalReason.STATE_UNWRITABLE)
        assert {pod.uid} == desk.service.rejected.keys()
        desk.disk.faults.revive()

        ran = [msgspec.structs.replace(one, has_run=True) for one in pod.containers]
        desk.bind(msgspec.structs.replace(pod, containers=tuple(ran)))

        await desk.service.allocate(ids(1))

        assert [pod.uid] == [row.key.pod_uid for row in desk.ledger.rows]


# The gates that the world closes, not the decision; and that no gate is without a scene.


LIBRARY = "/usr/local/vgpu/libvgpu.so"
CHECK_BOTH = "an operator has to check both"
CHECK_DISK = "an operator has to check the node's disk"


def hang_records(desk) -> None:
    """The kubelet has no Get, and its checkpoint file cannot be read."""
    desk.witness.supported = False
    desk.records.delay = 1000.0


CLOSED = {
    "a silent kubelet": (
        lambda desk: setattr(desk.witness, "failures", [KubeletError("no such socket")] * 3),
        (RefusalReason.WITNESS_SILENT, "no such socket", "controller starts it again"),
        ("find-pod", False),
    ),
    "a kubelet that hangs": (
        lambda desk: setattr(desk.witness, "hung", True),
        (RefusalReason.OUT_OF_TIME, "which pod", CHECK_BOTH),
        ("find-pod", False),
    ),
    "its file hangs": (
        hang_records,
        (RefusalReason.OUT_OF_TIME, "disk did not say in time which pod this is", CHECK_BOTH),
        ("find-pod", False),
    ),
    "a full disk": (
        lambda desk: desk.disk.faults.fail_at(0, errno.ENOSPC, times=50),
        (RefusalReason.STATE_UNWRITABLE, "ENOSPC", CHECK_DISK),
        ("disk", True),
    ),
    "a disk that hangs": (
        lambda desk: desk.disk.gate.clear(),
        (RefusalReason.STATE_UNWRITABLE, "the disk has not answered", CHECK_DISK),
        ("disk", True),
    ),
    "no directory": (
        lambda desk: setattr(desk.hooks, "failure", StateError("/usr/local/vgpu is read-only")),
        (RefusalReason.HOST_DIRECTORY, "read-only", "hook path"),
        ("directory", True),
    ),
    "a directory that hangs": (
        lambda desk: desk.hooks.gate.clear(),
        (RefusalReason.HOST_DIRECTORY, "the disk has not answered", "hook path"),
        ("directory", True),
    ),
    "a hook path that hangs": (
        lambda desk: setattr(desk.hooks, "hanging", "facts"),
        (RefusalReason.HOST_DIRECTORY, "hook path", "hook path"),
        ("hook-path", False),
    ),
    "no library": (
        lambda desk: setattr(desk.hooks, "missing", (LIBRARY,)),
        (RefusalReason.NO_LIBRARY, f"{LIBRARY} missing", "an operator has to install it"),
        ("find-pod", True),
    ),
}
"""What is wrong; gate, what is wrong and what to do in words; the step, and if the pod is known."""


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize(("break_it", "refusal", "logged"), CLOSED.values(), ids=CLOSED)
async def test_what_fails_or_hangs_is_named_and_what_to_do(break_it, refusal, logged, disabled):
    """Also for a container that wants no HAMi-core: its mounts would hinder an installation."""
    gate, wrong, todo = refusal
    async with a_desk() as desk:
        pod = desk.bind(placed(1, containers=(a_container(control_disabled=disabled),)))
        break_it(desk)
        began = asyncio.get_running_loop().time()
        with capture_logs() as logs, pytest.raises(Refusal) as caught:
            await desk.service.allocate(ids(1))
        took = asyncio.get_running_loop().time() - began
        desk.disk.gate.set()
        assert gate is not RefusalReason.NO_LIBRARY or set() == desk.hooks.names

    check_refusal(caught.value, gate, wrong=wrong, todo=todo)
    assert caught.value.transient
    assert {("refused", gate.name.lower()): 1} == desk.results
    assert [] == desk.said  # the pod's own status shows it
    (line,) = [entry for entry in logs if entry["event"] == "alloc.refused"]
    step, is_known = logged
    told = ("team-a", pod.name, "main") if is_known else (None, None, None)
    keys = ("gate", "step", "ns", "pod", "ctr")
    assert (gate.value, step, *told) == tuple(line.get(key) for key in keys)
    assert took <= KUBELET_BUDGET + DISK_BUDGET


def test_a_row_of_another_gpu_is_a_refusal_of_its_start():
    check_refusal(
        mismatch(a_row(slice_ids=ids(0, gpu=1), offered=True)),
        RefusalReason.OTHER_GPU_BOOKED,
        wrong="booked slices of",
        todo="create the pod again",
    )


DOOR = {RefusalReason.MALFORMED_REQUEST, RefusalReason.EMPTY_REQUEST, RefusalReason.STOPPING}
"""Closed by the door itself: tests/doors/test_plugin_bad_input.py and test_plugin_server.py."""
ALONE = {RefusalReason.OVERLAP, RefusalReason.OTHER_GPU_BOOKED}
"""Those with a test of their own above."""
STARVATION = {RefusalReason.STARVED, RefusalReason.PODS_UNKNOWN}
"""In tests/app/test_starvation.py."""


def test_each_gate_has_a_scene_that_closes_it():
    scenes = {row[1] for row in PLAIN.values()} | {row[1][0] for row in CLOSED.values()}
    assert set(RefusalReason) == DECIDED | DOOR | ALONE | STARVATION | scenes


# What one Allocate does is counted. It does not grow with the pods and rows of the node.


CALLS = 600
"""Function calls of one Allocate. Each row on its GPU adds up to CALLS_OF_A_ROW."""
CALLS_OF_A_ROW = 55
BYTES_OF_A_ROW = 2048


async def counted(desk: Desk) -> Counter[str]:
    """The agent's functions that one Allocate calls, for a pod that the node has not seen."""
    new = placed(1_000_000, f"{G1},NVIDIA,1,0:;", reusable_name=False)
    desk.bind(new)
    await asyncio.sleep(1)  # the look at the kubelet's start is over
    desk.records.reads = 0
    calls: Counter[str] = Counter()

    def count_call(frame: FrameType, event: str, _function: object) -> None:
        if event == "call" and "/agent/" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        await desk.service.allocate(ids(0))
    finally:
        sys.setprofile(before)
    assert new.uid in {row.key.pod_uid for row in desk.ledger.rows}
    return calls


@pytest.mark.parametrize(
    ("pods", "containers", "gpus", "slices"),
    [
        (0, 0, 1, 10),
        (10, 1, 8, 10),
        (110, 1, 16, 10),
        (110, 1, 16, 1000),
        (100, 1, 16, 1000),
        (500, 1, 16, 1000),
        (500, 20, 16, 1000),
    ],
)
async def test_an_allocate_does_no_more_on_a_full_node_than_on_an_empty_one(
    pods, containers, gpus, slices
):
    async with a_desk() as desk:
        await fill(desk, pods, containers, gpus, slices)
        desk.disk.writes = 0

        calls = await counted(desk)

        rows, rows_beside = pods * containers, -(-pods * containers // gpus)
        content = await desk.disk.content("state.json")
    assert CALLS + CALLS_OF_A_ROW * rows_beside >= calls.total(), calls.most_common(20)
    assert 3 * (rows_beside + 1) >= calls["_live"] + calls["scheduled"] + calls["claim_of"]
    assert (1, 0, 0) == (len(desk.witness.asked), len(desk.gets), desk.refreshes)
    assert (1, 1, 0) == (desk.disk.writes, desk.hooks.made.total(), desk.records.reads)
    assert BYTES_OF_A_ROW * (rows + 5) >= len(content)
