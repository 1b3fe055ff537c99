"""What the agent says of itself: readiness from the cells."""

import dataclasses

from agent.app.parts import Parts
from agent.core.readiness import Check
from agent.host.kube.session import KubeSession
from agent.kit.heartbeat import Heartbeat


@dataclasses.dataclass(eq=False, slots=True)
class Watched:
    """What the web door looks at; a standby has no parts."""

    heartbeat: Heartbeat
    standby: str = ""
    parts: Parts | None = None
    session: KubeSession | None = None

    def checks(self) -> tuple[Check, ...]:
        """What readiness is made of."""
        if self.parts is None:
            return (Check("instance", ok=False, text=f"standby: {self.standby}"),)
        return _checks(self.parts)


def _checks(parts: Parts) -> tuple[Check, ...]:
    facts, registration = parts.facts, parts.registration.state.value
    writable = parts.state.error.value
    problem = parts.knowing.discovery.problem.value
    report, table = facts.report.value, facts.pods.value
    inventory = facts.inventory.value
    return (
        Check("state", not writable, writable),
        Check("server", bool(parts.server.endpoint), "the plugin's socket does not serve yet"),
        Check(
            "inventory", inventory.generation > 0, problem or "the driver has not been asked yet"
        ),
        Check("registered", registration.registered, registration.text),
        Check("stream", registration.stream, registration.text or "the kubelet takes no lists"),
        Check("api_synced", table.synced, "the API server has not listed this node's pods yet"),
        Check("api", not table.stale, "the watch of this node's pods is down", required=False),
        Check("report", report.reported, report.reason, required=False),
        Check("driver", not problem, problem or "", required=False),
        Check("gpus", bool(inventory.gpus), "there are no GPUs to share", required=False),
        _gpu_health(parts),
    )


def _gpu_health(parts: Parts) -> Check:
    ill = [gpu for gpu in parts.facts.inventory.value.gpus if not gpu.serving]
    text = "; ".join(
        f"GPU {gpu.gpu.index} is {gpu.health.condition.value}: {gpu.health.text}" for gpu in ill
    )
    return Check("gpu_health", not ill, text, required=False)
