"""Computes the readiness checks of the agent from its cells."""

import enum
from collections.abc import Sequence

import msgspec

from agent.app.back import Back
from agent.app.front import Front
from agent.app.running import AgentParts
from agent.core.inventory.gpu import GpuFault, Trouble
from agent.core.inventory.inventory import Inventory
from agent.core.node.readiness import STANDBY, Check
from agent.kit.tasks import Heartbeat


class WebDoor(enum.StrEnum):
    """The listeners of the web pages, by task name. Each serves and fails by itself."""

    PORT = "web"
    SOCKET = "web_socket"


class WebSubjects(msgspec.Struct, eq=False):
    """What the web pages show; a standby has no parts. `shut`: why a listener cannot open.

    A standby opens only the port. The unix socket belongs to the agent that serves.
    """

    heartbeat: Heartbeat
    standby: str = ""
    parts: AgentParts | None = None
    shut: dict[WebDoor, str] = msgspec.field(default_factory=dict)

    def checks(self) -> tuple[Check, ...]:
        """All readiness checks."""
        if self.parts is None:
            return (Check(STANDBY, ok=False, text=f"standby: {self.standby}"),)
        return (*_checks(self.parts), *map(self._open, WebDoor))

    def _open(self, door: WebDoor) -> Check:
        text = self.shut.get(door, "")
        return Check(door.value, not text, text, required=False)


def _checks(parts: AgentParts) -> tuple[Check, ...]:
    front = parts.front
    facts, trouble = front.facts, front.settings.trouble
    writable = front.state.error.value
    problem = front.knowing.discovery.problem.value
    inventory = facts.inventory.value
    left_out = front.knowing.keeper.left_out.value
    return (
        Check("state", not writable, writable),
        _described(inventory, left_out, problem),
        *(() if parts.observe else _kubelet(front)),
        *_api(parts),
        Check("settings", not trouble, trouble, required=False),
        Check("driver", not problem, problem or "", required=False),
        Check("gpus", bool(inventory.gpus), "there are no GPUs to share", required=False),
        _answering(left_out),
        *_gpu_health(front),
        _offer(front),
    )


def _kubelet(front: Front) -> tuple[Check, ...]:
    registration = front.registration.state.value
    return (
        Check("server", bool(front.server.endpoint), "the plugin's socket does not serve yet"),
        Check("registered", registration.registered, registration.text),
        Check("stream", registration.stream, registration.text or "the kubelet takes no lists"),
    )


def _api(parts: AgentParts) -> tuple[Check, ...]:
    """The checks that need the API server; plain mode has none."""
    if not isinstance(parts.back, Back):
        return ()
    table, reporting = parts.front.facts.pods.value, parts.back.checks()
    if parts.observe:
        return reporting
    return (
        Check("api_synced", table.synced, "the API server has not listed this node's pods yet"),
        Check("api", not table.stale, "the watch of this node's pods is down", required=False),
        *reporting,
    )


def _described(inventory: Inventory, left_out: Sequence[GpuFault], problem: str | None) -> Check:
    """Whether there is a list of GPUs. While no GPU has answered yet, there is none."""
    waking = "" if inventory.gpus else _waking(left_out)
    text = f"the driver answers; {waking}" if waking else "the driver has not been asked yet"
    return Check("inventory", inventory.generation > 0 and not waking, problem or text)


def _waking(left_out: Sequence[GpuFault]) -> str:
    """The GPUs that have not answered yet. GPUs with the same text are named together."""
    named: dict[str, list[str]] = {}
    for fault in left_out:
        if fault.trouble is Trouble.SILENT:
            named.setdefault(fault.text, []).append(fault.gpu)
    return "; ".join(
        f"{'GPU' if len(gpus) == 1 else 'GPUs'} {', '.join(gpus)}: {text}"
        for text, gpus in named.items()
    )


def _answering(left_out: Sequence[GpuFault]) -> Check:
    """Whether all GPUs answer. One that still initialises is not missing and not left out."""
    text = _waking(left_out)
    return Check("gpus_answering", not text, text, required=False)


def _gpu_health(front: Front) -> tuple[Check, ...]:
    """Whether all GPUs are served, and whether container runtimes find those that are well."""
    unserved = [gpu for gpu in front.facts.inventory.value.gpus if not gpu.serving]
    missed = [gpu for gpu in unserved if gpu.health.serving and gpu.there and gpu.wanted]
    ill = [gpu for gpu in unserved if gpu not in missed]
    texts = [
        "; ".join(f"GPU {gpu.gpu.label} {gpu.plight}" for gpu in gpus) for gpus in (ill, missed)
    ]
    return tuple(
        Check(name, not text, text, required=False)
        for name, text in zip(("gpu_health", "cdi"), texts, strict=True)
    )


def _offer(front: Front) -> Check:
    withheld = front.knowing.withholder.state.value
    text = f"no slice is on offer: {'; '.join(withheld.reasons)}"
    return Check("offer", not withheld.holds, text, required=False)
