"""What the metrics page counts: every service's own tallies, gathered."""

from agent.app.back import Back
from agent.app.front import Front
from agent.web.metrics import Reading, Series


def series_of(front: Front, back: Back) -> Series:
    """What every service counts."""
    knowing, traffic, api = front.knowing, front.server.traffic, back.api
    return Series(
        tallies=(
            back.allocation.results,
            front.state.errors,
            front.registration.registrations,
            knowing.health.xid_events,
            knowing.health.transitions,
            back.node.restarts,
            back.pods.restarts,
            back.report.writes,
            back.report.failures,
            back.outbox.results,
            front.notices.events,
            api.events.posted,
            api.session.requests,
            api.session.received,
            traffic.calls,
        ),
        durations=(traffic.durations,),
        readings=_readings(front, back),
    )


def _readings(front: Front, back: Back) -> tuple[Reading, ...]:
    return (
        Reading(
            "checkpoint_generation",
            "Generation of the state that is on disk.",
            lambda: front.state.generation,
        ),
        Reading(
            "allocation_unconfirmed",
            "Rows that the kubelet has not confirmed after a minute.",
            lambda: back.reconcile.unconfirmed.value,
        ),
        Reading(
            "allocation_drifted",
            "Rows whose slice ids at the kubelet came to differ from the answer's.",
            lambda: back.reconcile.drifted.value,
        ),
        Reading(
            "kubelet_stream_up",
            "1 while the kubelet takes the lists.",
            lambda: float(front.registration.state.value.stream),
        ),
    )
