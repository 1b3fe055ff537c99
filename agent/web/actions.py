"""Answers the actions on the unix socket: `POST /api/v1/gpus/GPU:ACTION`."""

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import structlog

from agent.codec.status_document import API_VERSION
from agent.core.errors import cap
from agent.core.health.maintenance import ALL, GpuRelease, Recheck
from agent.core.inventory.gpu import NO_INDEX
from agent.kit.backoff import Throttle
from agent.kit.unix import peer_uid
from agent.web import aiohttp_server as web
from agent.web.gate import TELL_PERIOD

log = structlog.get_logger(__name__)

PATH = re.compile(r"/api/v1/gpus/([^/:]{1,64}):([a-z-]{1,32})")

_STOP = "stop the agent for work on it"

Act = Callable[[str], Awaitable[web.Response]]
"""Does one action with the GPU of that index or UUID."""

LeftOut = Callable[[str], str]
"""Why the GPU of that index or UUID is not shared; empty: it is shared or unknown."""


class Actions:
    """Answers POST for root and the agent's own user; others are refused."""

    def __init__(self, acts: Mapping[str, Act]) -> None:
        self._acts = acts
        self._refused = Throttle(TELL_PERIOD)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Do the action, or answer why not."""
        match = PATH.fullmatch(request.path)
        act = self._acts.get(match[2]) if match else None
        if match is None or act is None:
            paths = [f"/api/v1/gpus/GPU:{name}" for name in self._acts]
            return _text(404, f"No such action. There is: {' '.join(paths)}")
        uid = peer_uid(request.transport)
        if uid not in {0, os.geteuid()}:
            left_out = self._refused.admit()
            if left_out is not None:
                log.warning("web.action_refused", path=request.path, uid=uid, more=left_out)
            return _text(403, "Only root may do this.")
        log.info("web.action", path=request.path, uid=uid)
        return await act(match[1])


def recheck_act(
    recheck: Callable[[str], Coroutine[Any, Any, Recheck | None]],
    known: Callable[[], Sequence[str]],
    uuids: Callable[[], Sequence[str]],
    left_out: LeftOut = lambda _: "",
) -> Act:
    """The action `:recheck`: probe the GPU now, or `all` GPUs at once.

    `known`: the indexes of shared GPUs, for an answer about another one. `uuids`: those of `all`.
    """

    async def act(name: str) -> web.Response:
        kind = "Recheck"
        data: dict[str, object]
        if name == ALL:
            kind, data = "RecheckAll", {"gpus": [_data(result) for result in await every()]}
        else:
            result = await recheck(name)
            if result is None:
                return _unknown(name, known(), left_out(name))
            data = _data(result)
        document = {"apiVersion": API_VERSION, "kind": kind, "data": data}
        return web.Response(text=json.dumps(document) + "\n", content_type="application/json")

    async def every() -> list[Recheck]:
        async with asyncio.TaskGroup() as tasks:
            rechecks = [tasks.create_task(recheck(uuid)) for uuid in uuids()]
        return [result for task in rechecks if (result := task.result()) is not None]

    return act


def release_act(
    release: Callable[[str], Awaitable[GpuRelease | None]],
    known: Callable[[], Sequence[str]],
    left_out: LeftOut = lambda _: "",
) -> Act:
    """The action `:release`: release the GPU, or `all`. `known`: as of recheck_act()."""

    async def act(name: str) -> web.Response:
        result = await release(name)
        if result is None and name == ALL:
            return _text(409, "No GPU of this node is shared: stop the agent for work on one.")
        if result is None:
            reason = left_out(name)
            way = "`hami-agent release all` releases it too" if known() else _STOP
            return _unknown(name, known(), f"{reason}; {way}" if reason else "")
        data = {
            "gpus": list(result.gpus),
            "heldBy": list(result.held_by),
            "released": not result.obstacle,
            "obstacle": result.obstacle,
        }
        document = {"apiVersion": API_VERSION, "kind": "Release", "data": data}
        return web.Response(text=json.dumps(document) + "\n", content_type="application/json")

    return act


def _data(result: Recheck) -> dict[str, object]:
    health = result.after
    return {
        "gpu": None if result.gpu.index == NO_INDEX else result.gpu.index,
        "uuid": result.gpu.uuid,
        "probe": {"outcome": result.probe.outcome.value, "text": result.probe.text},
        "was": result.before.condition.value,
        "condition": health.condition.value,
        "since": health.since.isoformat(timespec="seconds"),
        "serving": result.serving,
        "cause": health.cause,
        "action": health.action,
        "runbook": health.runbook,
        "text": health.text,
        "missing": list(result.missing),
    }


def _unknown(name: str, known: Sequence[str], left_out: str) -> web.Response:
    if left_out:
        return _text(409, f"GPU {cap(name)} is not shared: {left_out}.")
    shared = ", ".join([*known, f"or {ALL}"]) if known else "none"
    return _text(404, f"No shared GPU is named {cap(name)}; shared GPUs: {shared}.")


def _text(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n")
