"""What the metrics page counts: every service's own tallies, gathered."""

from agent.app.parts import Parts
from agent.host.kube.session import KubeSession
from agent.web.metrics import Reading, Series


def series_of(parts: Parts, session: KubeSession) -> Series:
    """What every service counts."""
    knowing, following, traffic = parts.knowing, parts.following, parts.server.traffic
    return Series(
        tallies=(
            parts.allocation.results,
            parts.state.errors,
            parts.registration.registrations,
            knowing.health.xid_events,
            knowing.health.transitions,
            knowing.node.restarts,
            knowing.pods.restarts,
            following.report.writes,
            following.report.failures,
            following.outbox.results,
            following.announcer.events,
            session.requests,
            session.received,
            traffic.calls,
        ),
        durations=(traffic.durations,),
        readings=(
            Reading(
                "checkpoint_generation",
                "Generation of the state that is on disk.",
                lambda: parts.state.generation,
            ),
            Reading(
                "allocation_unconfirmed",
                "Rows that the kubelet has not confirmed after a minute.",
                lambda: following.reconcile.unconfirmed.value,
            ),
            Reading(
                "allocation_drifted",
                "Rows whose slice ids at the kubelet came to differ from the answer's.",
                lambda: following.reconcile.drifted.value,
            ),
            Reading(
                "kubelet_stream_up",
                "1 while the kubelet takes the lists.",
                lambda: float(parts.registration.state.value.stream),
            ),
        ),
    )
