"""What may be asked for through the unix socket, and by whom: `POST /api/v1/gpus/GPU:ACTION`."""

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import structlog
from aiohttp import web

from agent.core.errors import cap
from agent.core.health.maintenance import ALL, GpuRelease, Recheck
from agent.core.inventory.gpu import NO_INDEX
from agent.kit.peer import peer_uid
from agent.kit.throttle import Throttle
from agent.web.gate import TELL_PERIOD

log = structlog.get_logger(__name__)

API_VERSION = "hami-agent/v1"
PATH = re.compile(r"/api/v1/gpus/([^/:]{1,64}):([a-z-]{1,32})")

_STOP = "stop the agent for work on it"

Act = Callable[[str], Awaitable[web.Response]]
"""Does one action to the GPU of that index or UUID."""

LeftOut = Callable[[str], str]
"""Why the GPU of that index or UUID is here and not shared; empty: it is not known to be so."""


class Actions:
    """Answers POST for root and for the agent's own user, who can do all that the agent can."""

    def __init__(self, acts: Mapping[str, Act]) -> None:
        self._acts = acts
        self._refused = Throttle(TELL_PERIOD)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """The action, done; or why not."""
        found = PATH.fullmatch(request.path)
        act = self._acts.get(found[2]) if found else None
        if found is None or act is None:
            paths = " ".join(f"/api/v1/gpus/GPU:{name}" for name in self._acts)
            return _text(404, f"No such action. There is: {paths}")
        uid = peer_uid(request.transport)
        if uid not in {0, os.geteuid()}:
            left_out = self._refused.admit()
            if left_out is not None:
                log.warning("web.action_refused", path=request.path, uid=uid, more=left_out)
            return _text(403, "Only root may do this.")
        log.info("web.action", path=request.path, uid=uid)
        return await act(found[1])


def recheck_act(
    recheck: Callable[[str], Coroutine[Any, Any, Recheck | None]],
    known: Callable[[], Sequence[str]],
    uuids: Callable[[], Sequence[str]],
    left_out: LeftOut = lambda _: "",
) -> Act:
    """`:recheck`: ask the GPU now, or `all` GPUs at once.

    `known`: the GPUs that are shared, for who names another one. `uuids`: who `all` are.
    """

    async def act(name: str) -> web.Response:
        kind = "Recheck"
        data: dict[str, object]
        if name == ALL:
            kind, data = "RecheckAll", {"gpus": [_told(one) for one in await every()]}
        else:
            found = await recheck(name)
            if found is None:
                return _unknown(name, known(), left_out(name))
            data = _told(found)
        document = {"apiVersion": API_VERSION, "kind": kind, "data": data}
        return web.Response(text=json.dumps(document) + "\n", content_type="application/json")

    async def every() -> list[Recheck]:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(recheck(uuid)) for uuid in uuids()]
        return [found for task in asked if (found := task.result()) is not None]

    return act


def release_act(
    release: Callable[[str], Awaitable[GpuRelease | None]],
    known: Callable[[], Sequence[str]],
    left_out: LeftOut = lambda _: "",
) -> Act:
    """`:release`: let go of the GPU, or of `all`. `known`: as above."""

    async def act(name: str) -> web.Response:
        found = await release(name)
        if found is None and name == ALL:
            return _text(409, "No GPU of this node is shared: stop the agent for work on one.")
        if found is None:
            reason = left_out(name)
            way = "`hami-agent release all` lets go of it, too" if known() else _STOP
            return _unknown(name, known(), f"{reason}; {way}" if reason else "")
        data = {
            "gpus": list(found.gpus),
            "heldBy": list(found.held_by),
            "released": not found.obstacle,
            "obstacle": found.obstacle,
        }
        document = {"apiVersion": API_VERSION, "kind": "Release", "data": data}
        return web.Response(text=json.dumps(document) + "\n", content_type="application/json")

    return act


def _told(found: Recheck) -> dict[str, object]:
    health = found.after
    return {
        "gpu": None if found.gpu.index == NO_INDEX else found.gpu.index,
        "uuid": found.gpu.uuid,
        "probe": {"outcome": found.probe.outcome.value, "text": found.probe.text},
        "was": found.before.condition.value,
        "condition": health.condition.value,
        "since": health.since.isoformat(timespec="seconds"),
        "serving": found.serving,
        "cause": health.cause,
        "action": health.action,
        "runbook": health.runbook,
        "text": health.text,
        "missing": list(found.missing),
    }


def _unknown(name: str, known: Sequence[str], left_out: str) -> web.Response:
    if left_out:
        return _text(409, f"GPU {cap(name)} is not shared: {left_out}.")
    there = ", ".join([*known, f"or {ALL}"]) if known else "none"
    return _text(404, f"There is no GPU {cap(name)} that is shared here; there are: {there}.")


def _text(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n")
