"""Answers `POST /api/v1/pods/[NAMESPACE/]POD:limit`: other limits for a running container."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from agent.codec.pod import INT32_MAX
from agent.codec.status_document import API_VERSION
from agent.core.errors import StateError, cap
from agent.core.inventory.gpu import GpuUuid
from agent.core.state.ledger import Row
from agent.core.usage.limit_answer import LimitAnswer
from agent.core.usage.live_limits import LimitRefused, LimitWish, answered_mib
from agent.web import aiohttp_server as web

PATH: Final = re.compile(r"/api/v1/pods/(?:([^/:]{1,63})/)?([^/:]{1,253}):limit")
FORM: Final = "/api/v1/pods/[NAMESPACE/]POD:limit"

_NUMBER: Final = re.compile(r"[0-9]{1,10}")

Limit = Callable[[LimitWish], Awaitable[LimitAnswer]]
"""Changes limits. Raises LimitRefused, StateError."""


class LimitDoor:
    """The action `:limit`. `labels`: how the GPUs are named."""

    def __init__(self, limit: Limit, labels: Callable[[], Mapping[GpuUuid, str]]) -> None:
        self._limit = limit
        self._labels = labels

    async def answer(self, match: re.Match[str], query: Mapping[str, str]) -> web.Response:
        """Change the limits, or answer why not: 400, 404, 409, 503."""
        wish = _wish(match, query)
        if isinstance(wish, str):
            return _text(400, wish)
        try:
            answer = await self._limit(wish)
        except LimitRefused as refused:
            return _text(404 if refused.unknown else 409, str(refused))
        except StateError as error:
            return _text(503, f"The limits could not be changed: {error}.")
        document = {"apiVersion": API_VERSION, "kind": "Limit", "data": self._data(answer)}
        return web.Response(text=json.dumps(document) + "\n", content_type="application/json")

    def _data(self, answer: LimitAnswer) -> dict[str, object]:
        row = answer.after
        return {
            "namespace": row.namespace,
            "pod": row.pod,
            "container": row.holder.container if row.holder else "",
            "changed": answer.changed,
            "reset": row.limits == row.shares,
            "gpus": [self._gpu(answer, place) for place in range(len(row.limits))],
            "obstacle": answer.obstacle,
            "notes": list(answer.notes),
        }

    def _gpu(self, answer: LimitAnswer, place: int) -> dict[str, object]:
        now, was = answer.after.limits[place], answer.before.limits[place]
        share = answer.after.shares[place]
        return {
            "gpu": self._labels().get(now.uuid, now.uuid),
            "uuid": now.uuid,
            "memoryMib": _mib(answer.after, now.memory_mib, place),
            "cores": now.core_percent,
            "wasMemoryMib": _mib(answer.before, was.memory_mib, place),
            "wasCores": was.core_percent,
            "answeredMemoryMib": _mib(answer.after, share.memory_mib, place),
            "answeredCores": share.core_percent,
        }


def _mib(row: Row, mib: int, place: int) -> int | None:
    """A share of all memory has the limit that was registered at its answer."""
    return mib or answered_mib(row, place)


def _wish(match: re.Match[str], query: Mapping[str, str]) -> LimitWish | str:
    """What the request asks for, or what is wrong with it."""
    known = ("container", "gpu", "memoryMib", "cores", "reset")
    for key in query:
        if key not in known:
            return f"There is no parameter {cap(key, 64)}; there are: {', '.join(known)}."
    memory = _number(query.get("memoryMib"), range(1, INT32_MAX + 1))
    cores = _number(query.get("cores"), range(101))
    reset = query.get("reset", "false")
    if "memoryMib" in query and memory is None:
        return f"memoryMib must be a whole number of MiB, 1 to {INT32_MAX}."
    if "cores" in query and cores is None:
        return "cores must be a whole number of percent, 0 to 100; 0 means no limit."
    if reset not in {"true", "false"} or (reset == "true") is (
        memory is not None or cores is not None
    ):
        return "Give memoryMib, cores or both; or reset=true alone."
    return LimitWish(
        pod=match[2],
        namespace=match[1] or "",
        container=query.get("container", ""),
        gpu=query.get("gpu", ""),
        memory_mib=memory,
        core_percent=cores,
        reset=reset == "true",
    )


def _number(text: str | None, allowed: Sequence[int]) -> int | None:
    if text is None or _NUMBER.fullmatch(text) is None:
        return None
    return int(text) if int(text) in allowed else None


def _text(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n")
