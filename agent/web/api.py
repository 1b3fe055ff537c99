"""The answers of the web port and the unix socket, except the page and the metrics.

They are the read API `/api/v1` (JSON with an ETag) and who may read it, the probes, `/version`, and
on the unix socket alone the actions on GPUs. Only actions wait; all other answers are made of
values in memory.
"""

import asyncio
import contextlib
import datetime as dt
import hashlib
import ipaddress
import json
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
import structlog
from aiohttp import web

from agent.errors import cap
from agent.health.watch import ALL, GpuRelease, Recheck
from agent.kit.tasks import Allowance
from agent.kubelet.door import peer_uid
from agent.model import NO_INDEX, ReaderPolicy, SharedGpu
from agent.node.findings import STANDBY, Check, degraded, is_ready
from agent.status import (
    API_VERSION,
    StatusFacts,
    allocations_of,
    envelope,
    gpus_of,
    names_of,
    node_of,
    status_of,
)
from agent.web.server import PREFIX, Reused

log = structlog.get_logger(__name__)


KEPT: Final = 0.5
"""Seconds for which a document is reused: many readers cost the loop no more than one."""

JSON: Final = "application/json"

LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""The names by which a browser on this host may ask."""

REASON_LIMIT: Final = 4096
"""Characters of a failed check's reason."""

TELL_PERIOD: Final = 60.0
"""Seconds between two log lines of refused actions."""

ACTIONS: Final = ("recheck", "release", "was-reset")

ACTION: Final = re.compile(rf"/api/v1/gpus/([^/:]{{1,64}}):({'|'.join(ACTIONS)})")
"""The path of an action: the name of a GPU, and what to do."""

_PARTS: Final[Mapping[str, tuple[str, Callable[[StatusFacts], object]]]] = {
    "status": ("Status", status_of),
    "node": ("Node", node_of),
    "gpus": ("Gpus", gpus_of),
    "allocations": ("Allocations", allocations_of),
    "refusals": ("Refusals", lambda facts: facts.refusals),
    "changes": ("Changes", lambda facts: facts.changes),
    "settings": ("Settings", lambda facts: facts.settings()),
}
"""The documents by the last part of their path, each with its kind."""


_Rendered: TypeAlias = tuple[object, dt.datetime, bytes, str]
"""The data of a document, its time, its JSON and its ETag, which is a hash without the time."""


class ReadApi:
    """Answers GET below `/api/v1/`.

    `facts` is read for each document, without waiting; None: there is none yet.
    """

    def __init__(
        self, facts: Callable[[], StatusFacts | None], readers: ReaderPolicy = ReaderPolicy.LOCAL
    ) -> None:
        self._facts = facts
        self._readers = readers
        self._documents = {name: Reused(partial(self._render, name), KEPT) for name in _PARTS}

    def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer a GET or HEAD: a document, or 304 to a reader that has it."""
        refused = refuse_reader(request, self._readers)
        if refused is not None:
            return refused

        name, _, gpu = request.path.removeprefix(PREFIX).partition("/")
        if name not in _PARTS or (gpu and name != "gpus"):
            there = " ".join(PREFIX + part for part in _PARTS)
            return _text(404, f"No such document. There is: {there} {PREFIX}gpus/GPU")

        made = self._documents[name].value()
        if made is None:
            return _text(503, "This agent stands by; ask again when it serves.")

        data, at, body, etag = made
        if gpu and isinstance(data, tuple):
            found = next((one for one in data if gpu in names_of(one)), None)
            if found is None:
                return _text(404, f"No GPU of this node is named {cap(gpu, 64)}.")

            _, _, body, etag = _rendered("Gpu", found, at)

        # The header may list several ETags, and a weak one is as good here.
        if etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers={"ETag": etag})

        return web.Response(body=body, content_type=JSON, headers={"ETag": etag})

    def _render(self, name: str) -> _Rendered | None:
        facts = self._facts()
        kind, read = _PARTS[name]
        return None if facts is None else _rendered(kind, read(facts), facts.now)


def _rendered(kind: str, data: object, at: dt.datetime) -> _Rendered:
    encoded = msgspec.json.encode(data)
    etag = f'"{hashlib.blake2b(encoded, digest_size=12).hexdigest()}"'
    return data, at, envelope(kind, msgspec.Raw(encoded), at), etag


def refuse_reader(request: web.BaseRequest, readers: ReaderPolicy) -> web.Response | None:
    """Answer somebody who may not read what names pods; None: he may.

    The unix socket is guarded by its permissions. With LOCAL a browser must name this host as
    local: else a page from elsewhere could let its own name point here, and read the answer (DNS
    rebinding).
    """
    transport = request.transport
    peer = transport.get_extra_info("peername") if transport else None
    source = str(peer[0]) if isinstance(peer, tuple) else ""
    is_unix = transport is not None and not source

    if readers is ReaderPolicy.ALL or is_unix:
        return None

    is_near = False
    with contextlib.suppress(ValueError):  # the connection is gone, so it has no address
        address = ipaddress.ip_address(source.partition("%")[0])
        # A socket for both families shows 127.0.0.1 as ::ffff:127.0.0.1.
        is_near = (getattr(address, "ipv4_mapped", None) or address).is_loopback

    if not is_near:
        return _text(
            403,
            f"{request.path} is served to this host only, because it names pods. Use "
            "`kubectl port-forward` to the agent's pod, an SSH tunnel, or `hami-agent status` "
            "on the node. With `web.readers: all`, everybody who reaches this port may read: "
            "then bind web.address to a protected network, or use a NetworkPolicy.",
        )

    host = request.headers.get("Host", "")
    name, _, port = host.rpartition(":")
    if (name if name and port.isdigit() else host).lower() not in LOCAL_HOSTS:
        text = "Ask by the name localhost or 127.0.0.1: other names are not answered here."
        return _text(403, text)

    return None


def livez(request: web.BaseRequest) -> web.Response:
    """Answer `/livez` and `/healthz`, as long as the loop runs: no answer means a restart.

    It checks only what a restart can repair: no driver and no API server. Standing tasks are not
    checked: if one ends, the process ends.
    """
    return _probed("livez", (Check("loop", ok=True),), request)


def readyz(checks: Callable[[], tuple[Check, ...]], request: web.BaseRequest) -> web.Response:
    """Answer `/readyz`: 503 while a required check fails; degraded checks are only listed.

    With `?standby` a standby is ready: an update ends a node's old agent once the new one is.
    """
    lax = STANDBY if "standby" in request.query else ""
    judged = (
        msgspec.structs.replace(check, required=False) if check.name == lax else check
        for check in checks()
    )
    return _probed("readyz", tuple(judged), request)


def _probed(name: str, checks: tuple[Check, ...], request: web.BaseRequest) -> web.Response:
    """Render as Kubernetes does: `ok`, or a line for each check if one fails or with ?verbose."""
    failed = not is_ready(checks)
    is_long = failed or "verbose" in request.query
    lines = [] if is_long else ["ok"]

    for check in checks if is_long else degraded(checks):
        if check.ok:
            lines.append(f"[+]{check.name} ok")
            continue

        sign, verdict = ("-", "failed") if check.required else ("!", "degraded")
        reason = cap(check.text, REASON_LIMIT) or "no reason given"
        lines.append(f"[{sign}]{check.name} {verdict}: {reason}")

    if is_long:
        lines.append(f"{name} check {'failed' if failed else 'passed'}")

    ending = "\n" if len(lines) > 1 else ""  # `ok` alone is as Kubernetes writes it
    return web.Response(status=503 if failed else 200, text="\n".join(lines) + ending)


class BuildInfo(msgspec.Struct, frozen=True):
    """The versions of the agent, of Python and of the state file, and the report profile.

    `revision` is the agent's commit, empty if unknown.
    """

    version: str
    python: str
    revision: str = ""
    schema: str = ""
    profile: str = "json"

    def page(self, _request: web.BaseRequest) -> web.Response:
        """Answer `/version`."""
        return web.Response(body=msgspec.json.encode(self), content_type=JSON)


class Actions(msgspec.Struct, eq=False):
    """Answers POST for root and the agent's own user; others are refused.

    `recheck(name, was_reset=)` probes the GPU of that index or UUID now, `release` releases it, or
    `all` GPUs; both return None if no GPU has that name. `gpus`: the shared GPUs, each with its
    label. `left_out`: why the GPU of that name is not shared; empty: it is, or it is unknown.
    """

    recheck: Callable[..., Coroutine[Any, Any, Recheck | None]]
    release: Callable[[str], Awaitable[GpuRelease | None]]
    gpus: Callable[[], Sequence[tuple[str, SharedGpu]]]
    left_out: Callable[[str], str] = lambda _: ""
    refused: Allowance = msgspec.field(default_factory=lambda: Allowance(1, TELL_PERIOD))

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Do the action, or answer why not."""
        match = ACTION.fullmatch(request.path)
        if match is None:
            paths = [f"{PREFIX}gpus/GPU:{name}" for name in ACTIONS]
            return _text(404, f"No such action. There is: {' '.join(paths)}")

        uid = peer_uid(request.transport)
        if uid not in {0, os.geteuid()}:
            more = self.refused.admit()
            if more is not None:
                log.warning("web.action_refused", path=request.path, uid=uid, more=more)
            return _text(403, "Only root may do this.")

        log.info("web.action", path=request.path, uid=uid)
        name, action = match.groups()
        if action == "release":
            return await self._release(name)

        # All at once: a probe of a GPU that hangs lasts until its deadline.
        names = [gpu.uuid for _, gpu in self.gpus()] if name == ALL else [name]
        async with asyncio.TaskGroup() as tasks:
            probes = [
                tasks.create_task(self.recheck(one, was_reset=action == "was-reset"))
                for one in names
            ]

        # A GPU that leaves the node meanwhile is left out.
        results = [_data(found) for probe in probes if (found := probe.result()) is not None]
        if name == ALL:
            return _json("RecheckAll", {"gpus": results})

        return _json("Recheck", results[0]) if results else self._unknown(name, self.left_out(name))

    async def _release(self, name: str) -> web.Response:
        """Release the GPU of that name, or all, and say who still has one."""
        result = await self.release(name)
        if result is None and name == ALL:
            return _text(409, "No GPU of this node is shared: stop the agent for work on one.")

        if result is None:
            reason = self.left_out(name)
            way = "stop the agent for work on it"
            if self.gpus():
                way = "`hami-agent release all` releases it too"

            return self._unknown(name, f"{reason}; {way}" if reason else "")

        data = {
            "gpus": list(result.gpus),
            "heldBy": list(result.held_by),
            "released": not result.obstacle,
            "obstacle": result.obstacle,
        }
        return _json("Release", data)

    def _unknown(self, name: str, left_out: str) -> web.Response:
        """Answer that no GPU is named so, or why that one is not shared."""
        if left_out:
            return _text(409, f"GPU {cap(name)} is not shared: {left_out}.")

        known = [label for label, _ in self.gpus()]
        shared = ", ".join([*known, f"or {ALL}"]) if known else "none"

        return _text(404, f"No shared GPU is named {cap(name)}; shared GPUs: {shared}.")


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


def _text(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n")


def _json(kind: str, data: Mapping[str, object]) -> web.Response:
    document = {"apiVersion": API_VERSION, "kind": kind, "data": data}
    return web.Response(text=json.dumps(document) + "\n", content_type=JSON)
