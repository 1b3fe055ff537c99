"""Restart policies: how often each task may fail, and the delays before its restarts."""

from collections.abc import Mapping

from agent.errors import AgentError
from agent.kit.tasks import RestartPolicy

EXPECTED: tuple[type[Exception], ...] = (AgentError, TimeoutError, OSError)
"""Failures of the outside world, logged in one line. Any other exception is a defect."""

DEFECTS = 3
"""Defects of one task within its window before the process gives up."""


def _policy(*delays: float, jitter: float = 0.0) -> RestartPolicy:
    return RestartPolicy(delays=delays, jitter=jitter, bug_budget=DEFECTS)


_LOCAL = _policy(0.1, 0.5, 1.0, 5.0)
_DRIVER = _policy(0.5, 1.0, 5.0, 30.0)
_WEB = _policy(0.5, 1.0, 10.0, 30.0)
_API = _policy(1.0, 2.0, 5.0, 15.0, 60.0, jitter=0.3)

POLICIES: Mapping[str, RestartPolicy] = {
    "state": _LOCAL,
    "notify": _LOCAL,
    "settings": _LOCAL,
    "journal": _LOCAL,
    "inventory": _LOCAL,
    "left_out": _LOCAL,
    "gpu_events": _LOCAL,
    "cordons": _LOCAL,
    "held": _LOCAL,
    "withholder": _LOCAL,
    "clearing": _LOCAL,
    "room": _LOCAL,
    "listing": _LOCAL,
    "discovery": _DRIVER,
    "health": _DRIVER,
    "samples": _DRIVER,
    "usage": _LOCAL,
    "pressure": _LOCAL,
    "node": _API,
    "pods": _API,
    "report": _API,
    "settlement": _API,
    "kubelet_start": _LOCAL,
    "reconcile": _policy(1.0, 5.0, 15.0, 60.0),
    "plugin": _policy(0.1, 0.5, 1.0, 10.0),
    "registration": _policy(0.05, 0.1, 0.5, 1.0, 10.0, jitter=0.2),
    "rival": _policy(0.1, 0.5, 1.0, 10.0),
    "announcer": _API,
    "condition": _API,
    "recent": _LOCAL,
    "kubelet": _policy(0.1, 0.5, 1.0, 5.0),
    "heartbeat": _LOCAL,
    "web": _WEB,
    "web_socket": _WEB,
}
