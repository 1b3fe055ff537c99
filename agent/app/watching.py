"""What the agent says of itself: readiness from the cells."""

import dataclasses

from agent.app.front import Front
from agent.app.running import Whole
from agent.core.readiness import Check
from agent.kit.heartbeat import Heartbeat


@dataclasses.dataclass(eq=False, slots=True)
class Watched:
    """What the web door looks at; a standby has no parts."""

    heartbeat: Heartbeat
    standby: str = ""
    whole: Whole | None = None

    def checks(self) -> tuple[Check, ...]:
        """What readiness is made of."""
        if self.whole is None:
            return (Check("instance", ok=False, text=f"standby: {self.standby}"),)
        return _checks(self.whole)


def _checks(whole: Whole) -> tuple[Check, ...]:
    front = whole.front
    facts = front.facts
    writable = front.state.error.value
    problem = front.knowing.discovery.problem.value
    inventory = facts.inventory.value
    return (
        Check("state", not writable, writable),
        Check(
            "inventory", inventory.generation > 0, problem or "the driver has not been asked yet"
        ),
        *(() if whole.observe else _kubelet(front)),
        *_api(whole),
        Check("driver", not problem, problem or "", required=False),
        Check("gpus", bool(inventory.gpus), "there are no GPUs to share", required=False),
        _gpu_health(front),
    )


def _kubelet(front: Front) -> tuple[Check, ...]:
    registration = front.registration.state.value
    return (
        Check("server", bool(front.server.endpoint), "the plugin's socket does not serve yet"),
        Check("registered", registration.registered, registration.text),
        Check("stream", registration.stream, registration.text or "the kubelet takes no lists"),
        _former(front),
    )


def _former(front: Front) -> Check:
    """Without them, containers that asked by a former name of our resource cannot start again."""
    states = [one.registration.state.value for one in front.endpoints.former]
    text = "; ".join(state.text for state in states if not state.stream)
    return Check("former_names", not text, text, required=False)


def _api(whole: Whole) -> tuple[Check, ...]:
    """What needs the API server; plain mode does without one."""
    if whole.plain:
        return ()
    table, back = whole.front.facts.pods.value, whole.back.value
    loading = Check("report", ok=False, text="the agent is still loading", required=False)
    reporting = (loading,) if back is None else back.checks()
    if whole.observe:
        return reporting
    return (
        Check("api_synced", table.synced, "the API server has not listed this node's pods yet"),
        Check("api", not table.stale, "the watch of this node's pods is down", required=False),
        *reporting,
    )


def _gpu_health(front: Front) -> Check:
    ill = [gpu for gpu in front.facts.inventory.value.gpus if not gpu.serving]
    text = "; ".join(f"GPU {gpu.gpu.label} {gpu.plight}" for gpu in ill)
    return Check("gpu_health", not ill, text, required=False)
