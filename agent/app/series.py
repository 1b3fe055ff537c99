"""Gathers the counters and gauges of all services for the metrics page."""

from agent.app.back import Back
from agent.app.front import Front
from agent.kit.timing import Tally
from agent.web.metrics import Gauge, MetricSources


def series_of(front: Front, back: Back) -> MetricSources:
    """The counters and gauges of all services."""
    knowing, state, traffic = front.knowing, front.state, front.server.traffic
    clearing, registration, reconcile = knowing.clearing, front.registration, back.reconcile
    tallies: list[Tally] = [
        back.allocation.results,
        state.errors,
        registration.registrations,
        knowing.health.xid_events,
        knowing.health.transitions,
        front.notices.unposted,
        traffic.calls,
    ]
    readings = [
        Gauge(
            "checkpoint_generation", "Generation of the state on disk.", lambda: state.generation
        ),
        Gauge(
            "kubelet_stream_up",
            "1 while the kubelet receives the lists of slices.",
            lambda: float(registration.state.value.stream),
        ),
        Gauge(
            "directories_kept",
            "Directories of ended containers that the agent cannot remove.",
            lambda: clearing.state.value.kept,
        ),
        Gauge(
            "hook_available_bytes",
            "Free bytes of the file system of the containers' directories.",
            lambda: clearing.room.value.available,
        ),
        Gauge(
            "hook_available_inodes",
            "Free inodes of the same file system; infinite if it has no limit.",
            lambda: clearing.room.value.inodes,
        ),
        Gauge(
            "allocation_unconfirmed",
            "Answers that the kubelet has not confirmed after 60 s, without init containers.",
            lambda: reconcile.unconfirmed.value,
        ),
    ]
    if back.events is not None:  # plain mode has no scheduler and no API server
        drifted = back.reconcile.drifted
        tallies += back.tallies
        readings.append(
            Gauge(
                "allocation_drifted",
                "Containers with slices of another GPU because the kubelet did not ask first, and "
                "init containers that the kubelet does not report.",
                lambda: drifted.value,
            )
        )
    durations = (
        traffic.durations,
        back.allocation.waits,
    )
    return MetricSources(tallies, durations, readings)
