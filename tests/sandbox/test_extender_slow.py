"""filter and bind before an API server that is slow: kube-scheduler is answered in time, always.

What it gave up or was refused it tries again: a bind that is repeated finds what the first one did.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from agent.sandbox.apiserver import ApiServerModel
from agent.sandbox.extender.server import BODY_DEADLINE
from agent.sandbox.extender.service import ANSWER_WITHIN, ExtenderOptions
from agent.sandbox.patching import merge_patch
from tests.fakes.extender_rig import Rig
from tests.fakes.scheduler_cluster import LOCK

pytestmark = [pytest.mark.looptime(False), pytest.mark.timeout(60)]

SOON = ExtenderOptions(answer_within=2.0)


class SlowServer(ApiServerModel):
    """Leaves requests without an answer until `free`; those of which `acts` holds are done."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.store, {"t": "admin"})
        self.is_held: Callable[[web.BaseRequest], bool] = lambda _: False
        self.acts = False
        self._free = asyncio.Event()

    def free(self) -> None:
        """Be quick from now on."""
        self.is_held = lambda _: False
        self._free.set()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        is_held = self.is_held(request)
        if is_held and not self.acts:
            await self._free.wait()
        answer = await super()._answer(request)
        if is_held:
            await self._free.wait()
        return answer


@contextlib.asynccontextmanager
async def slowly(folder: Path, options: ExtenderOptions) -> AsyncIterator[tuple[Rig, SlowServer]]:
    """A cluster of `n1` and `n2`, its server, and an extender."""
    rig = Rig(folder)
    rig.api = api = SlowServer(rig)
    await api.start()
    try:
        rig.create_node()
        rig.create_node("n2", ("GPU-b",))
        async with rig.extending(options):
            await until_ready(rig)
            yield rig, api
    finally:
        await api.stop()


async def until_ready(rig: Rig) -> None:
    """The extender has its lists: what the deadlines of a test begin with."""
    async with asyncio.timeout(20):
        while (await rig.get("/readyz"))[0] != 200:  # noqa: ASYNC110 -- only asking tells
            await asyncio.sleep(0.02)


def is_binding(request: web.BaseRequest) -> bool:
    return request.path.endswith("/binding")


def is_pod(request: web.BaseRequest) -> bool:
    """A read of one pod, or a write to it."""
    return "/pods/" in request.path


def bindings(api: SlowServer) -> int:
    return sum(call.subresource == "binding" for call in api.journal.calls)


def writes(api: SlowServer, resource: str) -> int:
    return sum(call.verb == "patch" and call.resource == resource for call in api.journal.calls)


def test_body_and_verb_together_take_less_than_kube_scheduler_waits() -> None:
    assert BODY_DEADLINE + ANSWER_WITHIN < 30


async def test_a_placement_that_takes_too_long_is_refused_and_not_counted(tmp_path: Path) -> None:
    async with slowly(tmp_path, SOON) as (rig, api):
        for name in ("slow", "quick"):
            rig.create_pod(name, memory_mib=12000)
        api.is_held = is_pod

        assert "the pod could not be written within 2 s" == (await rig.filter("slow"))["Error"]

        api.free()
        assert ["n1"] == (await rig.filter("quick"))["NodeNames"]


async def test_a_binding_that_takes_too_long_is_refused_and_gives_the_lock_back(
    tmp_path: Path,
) -> None:
    async with slowly(tmp_path, SOON) as (rig, api):
        rig.create_pod("p")
        await rig.filter("p")
        api.is_held = is_binding

        assert "the API server was too slow" == await rig.bind("p")

        assert LOCK not in rig.node()
        await rig.until_told("p", "FilteringSucceed", "BindingFailed")


async def test_a_server_that_says_nothing_more_does_not_hold_bind_up(tmp_path: Path) -> None:
    async with slowly(tmp_path, SOON) as (rig, api):
        rig.create_pod("p")
        await rig.filter("p")
        api.is_held = lambda _: LOCK in rig.node()

        assert "the pod could not be bound within 2 s" == await rig.bind("p")
        held = rig.node()[LOCK]

        api.free()
        assert "" == await rig.bind("p")
        assert held == rig.node()[LOCK]


async def test_a_server_that_is_slow_from_the_first_question_is_told_so(tmp_path: Path) -> None:
    async with slowly(tmp_path, SOON) as (rig, api):
        rig.create_pod("p")
        await rig.filter("p")
        api.is_held = is_pod

        assert "the API server was too slow" == await rig.bind("p")

        assert LOCK not in rig.node()
        api.free()


async def test_a_binding_whose_answer_was_lost_is_a_success(tmp_path: Path) -> None:
    async with slowly(tmp_path, SOON) as (rig, api):
        rig.create_pod("p")
        await rig.filter("p")
        api.is_held, api.acts = is_binding, True

        assert "" == await rig.bind("p")

        assert rig.node()[LOCK].endswith(",default,p")
        await rig.until_told("p", "FilteringSucceed", "BindingSucceed")


async def test_a_bind_that_is_repeated_is_a_success_and_keeps_the_lock(tmp_path: Path) -> None:
    async with slowly(tmp_path, SOON) as (rig, api):
        rig.create_pod("p")
        await rig.filter("p")
        api.acts = True
        api.is_held = lambda request: is_binding(request) or (is_pod(request) and bindings(api) > 0)

        assert "the pod could not be bound within 2 s" == await rig.bind("p")
        assert "n1" == rig.pod("p")["spec"]["nodeName"]
        held, before = rig.node()[LOCK], writes(api, "nodes")
        api.free()

        assert "" == await rig.bind("p")
        assert held == rig.node()[LOCK]
        assert (1, before) == (bindings(api), writes(api, "nodes"))


async def test_a_bind_that_is_repeated_after_the_agent_was_done_changes_nothing(
    tmp_path: Path,
) -> None:
    async with slowly(tmp_path, ExtenderOptions()) as (rig, api):
        rig.create_pod("p")
        await rig.filter("p")
        await rig.bind("p")
        rig.annotate_node(lock=None)
        done = {"metadata": {"annotations": {"hami.io/bind-phase": "success"}}}
        rig.store.update("pods", "default", "p", lambda pod: merge_patch(pod, done))

        assert "" == await rig.bind("p")

        assert LOCK not in rig.node()
        assert "success" == rig.marks("p")["hami.io/bind-phase"]
        assert 1 == bindings(api)


@pytest.mark.parametrize("lock", ["2026-08-21T06:20:39Z,default,other", "2026-08-21T06:20:39Z"])
async def test_a_bind_that_is_repeated_for_another_node_is_refused_and_frees_nothing(
    tmp_path: Path, lock: str
) -> None:
    async with slowly(tmp_path, ExtenderOptions()) as (rig, api):
        rig.create_pod("p")
        await rig.filter("p")
        await rig.bind("p")
        rig.annotate_node("n2", lock=lock)
        held, before = rig.node()[LOCK], writes(api, "nodes")

        assert 'pod p is already assigned to node "n1"' == await rig.bind("p", "n2")

        assert (held, lock) == (rig.node()[LOCK], rig.node("n2")[LOCK])
        assert (1, before) == (bindings(api), writes(api, "nodes"))
        await rig.until_told("p", "FilteringSucceed", "BindingSucceed", "BindingFailed")


async def test_a_bind_for_a_pod_that_was_made_again_frees_nothing(tmp_path: Path) -> None:
    async with slowly(tmp_path, ExtenderOptions()) as (rig, _):
        rig.create_pod("p")
        await rig.filter("p")
        await rig.bind("p")
        held, uid = rig.node()[LOCK], rig.pod("p")["metadata"]["uid"]
        args = {"PodName": "p", "PodNamespace": "default", "PodUID": "u", "Node": "n1"}

        _, answer = await rig.post("/bind", args)

        assert f'pod "p" not found: the one of that name has UID {uid}' == answer["Error"]
        assert held == rig.node()[LOCK]


async def test_two_binds_of_one_pod_at_once_are_one(tmp_path: Path) -> None:
    async with slowly(tmp_path, ExtenderOptions()) as (rig, api):
        rig.create_pod("p")
        await rig.filter("p")

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(rig.bind("p")) for _ in range(4)]

        assert [""] * 4 == [task.result() for task in tasks]
        assert 1 == bindings(api)
        assert rig.node()[LOCK].endswith(",default,p")
        await rig.until_told("p", "FilteringSucceed", "BindingSucceed")
        assert [1, 1] == [event["count"] for event in rig.store.select("events")]


async def test_events_hold_no_verb_up(tmp_path: Path) -> None:
    async with slowly(tmp_path, ExtenderOptions()) as (rig, api):
        api.is_held = lambda request: "/events" in request.path
        rig.create_pod("p")

        assert ["n1"] == (await rig.filter("p"))["NodeNames"]
        assert "" == await rig.bind("p")
        assert [] == rig.events("p")

        api.free()
        await rig.until_told("p", "FilteringSucceed", "BindingSucceed")
