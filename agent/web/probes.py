"""Liveness and readiness, in the form that people know from the API server."""

import dataclasses
from collections.abc import Callable, Iterable

from aiohttp import web

from agent.core.errors import cap
from agent.core.node.readiness import Check, degraded, is_ready

TEXT_LIMIT = 4096
"""Characters of one line's reason."""

FRESH = 10.0
"""Seconds after which a loop that has not turned counts as stuck."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probes:
    """Where the answers come from.

    `heartbeat_age`: seconds since the loop's last sign of life. `checks`: what readiness is made
    of. A standing task that ends takes the process with it, so none is looked at here.
    """

    heartbeat_age: Callable[[], float]
    checks: Callable[[], tuple[Check, ...]]

    def alive(self) -> tuple[Check, ...]:
        """Only what a restart can cure: neither the driver nor the API server is among it."""
        age = self.heartbeat_age()
        return (Check("loop", age < FRESH, f"the last sign of life is {age:.0f} s old"),)

    def livez(self, request: web.BaseRequest) -> web.Response:
        """`/livez` and `/healthz`: 503 asks for a restart."""
        return _answer("livez", self.alive(), request)

    def readyz(self, request: web.BaseRequest) -> web.Response:
        """`/readyz`: 503 while a required check fails; what is merely degraded is listed."""
        return _answer("readyz", self.checks(), request)


def _answer(name: str, checks: tuple[Check, ...], request: web.BaseRequest) -> web.Response:
    """Kubernetes' own form: `ok`, or one line a check when asked for or when one fails."""
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
