"""Liveness and readiness pages, in the form of the API server's."""

from collections.abc import Callable, Iterable

import msgspec

from agent.core.errors import cap
from agent.core.node.readiness import STANDBY, Check, degraded, is_ready
from agent.web import aiohttp_server as web

TEXT_LIMIT = 4096
"""Characters of one line's reason."""

FRESH = 15.0
"""The oldest heartbeat of a loop that was not stuck for 10 s: there is one each 5 s."""


class Probes(msgspec.Struct, frozen=True):
    """Answers the probes.

    `heartbeat_age`: seconds since the loop's last heartbeat. `checks`: the checks of readiness.
    Standing tasks are not checked: if one ends, the process ends.
    """

    heartbeat_age: Callable[[], float]
    checks: Callable[[], tuple[Check, ...]]

    def alive(self) -> tuple[Check, ...]:
        """The checks of liveness: only what a restart can repair, no driver and no API server."""
        age = self.heartbeat_age()
        return (Check("loop", age < FRESH, f"the last heartbeat is {age:.0f} s old"),)

    def livez(self, request: web.BaseRequest) -> web.Response:
        """Answer `/livez` and `/healthz`: 503 means that a restart is needed."""
        return _answer("livez", self.alive(), request)

    def readyz(self, request: web.BaseRequest) -> web.Response:
        """Answer `/readyz`: 503 while a required check fails; degraded checks are only listed.

        With `?standby` a standby is ready: an update ends a node's old agent once the new one is.
        """
        lax = STANDBY if "standby" in request.query else ""
        checks = (
            msgspec.structs.replace(check, required=False) if check.name == lax else check
            for check in self.checks()
        )
        return _answer("readyz", tuple(checks), request)


def _answer(name: str, checks: tuple[Check, ...], request: web.BaseRequest) -> web.Response:
    """Render as Kubernetes does: `ok`, or a line for each check if one fails or with ?verbose."""
    if not is_ready(checks):
        text = f"{_lines(checks)}{name} check failed\n"
        return web.Response(status=503, text=text)
    if "verbose" in request.query:
        return web.Response(text=f"{_lines(checks)}{name} check passed\n")
    return web.Response(text=f"ok\n{_lines(degraded(checks))}" if degraded(checks) else "ok")


def _lines(checks: Iterable[Check]) -> str:
    return "".join(f"{_line(check)}\n" for check in checks)


def _line(check: Check) -> str:
    if check.ok:
        return f"[+]{check.name} ok"
    verdict = "failed" if check.required else "degraded"
    sign = "-" if check.required else "!"
    return f"[{sign}]{check.name} {verdict}: {cap(check.text, TEXT_LIMIT) or 'no reason given'}"
