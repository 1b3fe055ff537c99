"""filter and bind before an API server, or behind a client, that is slow."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from agent.sandbox.apiserver import ApiServerModel
from agent.sandbox.extender.service import ExtenderOptions
from agent.sandbox.patching import merge_patch
from tests.fakes.extender_rig import ExtenderRig
from tests.fakes.scheduler_cluster import LOCK

pytestmark = [pytest.mark.looptime(False), pytest.mark.timeout(60)]


class SlowServer(ApiServerModel):
    """Leaves requests without an answer until `free`."""

    def __init__(self, rig: ExtenderRig) -> None:
        super().__init__(rig.store, {"t": "admin"})
        self.is_held: Callable[[web.BaseRequest], bool] = lambda _: False
        self._free = asyncio.Event()

    def free(self) -> None:
        """Be quick from now on."""
        self.is_held = lambda _: False
        self._free.set()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.is_held(request):
            await self._free.wait()
        return await super()._answer(request)


@contextlib.asynccontextmanager
async def slowly(
    folder: Path, options: ExtenderOptions | None = None
) -> AsyncIterator[tuple[ExtenderRig, SlowServer]]:
    """A cluster of `n1` and `n2`, its server, and an extender."""
    rig = ExtenderRig(folder)
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


async def until_ready(rig: ExtenderRig) -> None:
    """The extender has its lists: what the deadlines of a test begin with."""
    async with asyncio.timeout(20):
        while (await rig.get("/readyz"))[0] != 200:  # noqa: ASYNC110 -- only asking tells
            await asyncio.sleep(0.02)


def is_binding(request: web.BaseRequest) -> bool:
    return request.path.endswith("/binding")


async def test_a_verb_is_worked_off_although_its_caller_has_hung_up(tmp_path: Path) -> None:
    async with slowly(tmp_path) as (rig, api):
        rig.create_pod("p")
        await rig.filter("p")
        api.is_held = is_binding
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await rig.bind("p")
        assert "nodeName" not in rig.pod("p")["spec"]

        api.free()
        await rig.until_told("p", "FilteringSucceed", "BindingSucceed")

        assert "n1" == rig.pod("p")["spec"]["nodeName"]
        assert rig.node()[LOCK].endswith(",default,p")


async def test_a_bind_for_another_node_fails_and_marks_the_pod_again(tmp_path: Path) -> None:
    async with slowly(tmp_path) as (rig, _):
        rig.create_pod("p")
        await rig.filter("p")
        await rig.bind("p")
        held = rig.node()[LOCK]
        done = {"metadata": {"annotations": {"hami.io/bind-phase": "success"}}}
        rig.store.update("pods", "default", "p", lambda pod: merge_patch(pod, done))

        assert "is already assigned to node" in await rig.bind("p", "n2")

        assert (held, False) == (rig.node()[LOCK], LOCK in rig.node("n2"))
        assert "allocating" == rig.marks("p")["hami.io/bind-phase"]


async def test_by_default_the_client_makes_ten_requests_and_then_five_a_second(
    tmp_path: Path,
) -> None:
    async with slowly(tmp_path, ExtenderOptions()) as (rig, api):
        began = asyncio.get_running_loop().time()
        for name in ("p1", "p2"):
            rig.create_pod(name)
            await rig.filter(name)
        await rig.bind("p1")
        await rig.bind("p2")
        made = [call for call in api.journal.calls if call.verb not in ("list", "watch")]

        over = asyncio.get_running_loop().time() - began
        assert len(made) > 10
        assert over >= (len(made) - 11) / 5


async def test_events_hold_no_verb_up(tmp_path: Path) -> None:
    async with slowly(tmp_path) as (rig, api):
        api.is_held = lambda request: "/events" in request.path
        rig.create_pod("p")

        assert ["n1"] == (await rig.filter("p"))["NodeNames"]
        assert "" == await rig.bind("p")
        assert [] == rig.events("p")

        api.free()
        await rig.until_told("p", "FilteringSucceed", "BindingSucceed")
