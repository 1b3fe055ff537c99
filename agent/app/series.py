"""Gathers the counters and gauges of all services for the metrics page."""

from collections.abc import Callable

from agent.app.back import Back, PlainBack
from agent.app.front import Front
from agent.kit.tally import Tally
from agent.web.metrics import Gauge, MetricSources


def series_of(front: Front, back: Back | PlainBack) -> MetricSources:
    """The counters and gauges of all services."""
    knowing, traffic = front.knowing, front.server.traffic
    if isinstance(back, PlainBack):
        tallies: tuple[Tally, ...] = (back.allocation.results,)
        readings: tuple[Gauge, ...] = (_unconfirmed(lambda: back.reconcile.unconfirmed.value),)
    else:
        tallies, readings = _tallies(back), _readings(back)
    return MetricSources(
        tallies=(
            *tallies,
            front.state.errors,
            front.registration.registrations,
            knowing.health.xid_events,
            knowing.health.transitions,
            front.notices.unposted,
            traffic.calls,
        ),
        durations=(
            traffic.durations,
            back.allocation.waits.durations,
        ),
        readings=(*_front_readings(front), *readings),
    )


def _tallies(back: Back) -> tuple[Tally, ...]:
    api = back.api
    return (
        back.allocation.results,
        back.node.restarts,
        back.pods.restarts,
        back.reconcile.mismatches,
        back.report.writes,
        back.report.failures,
        back.outbox.results,
        api.events.posted,
        api.session.requests,
        api.session.received,
    )


def _front_readings(front: Front) -> tuple[Gauge, ...]:
    room = front.knowing.clearing.room
    return (
        Gauge(
            "checkpoint_generation",
            "Generation of the state on disk.",
            lambda: front.state.generation,
        ),
        Gauge(
            "kubelet_stream_up",
            "1 while the kubelet receives the lists of slices.",
            lambda: float(front.registration.state.value.stream),
        ),
        Gauge(
            "directories_kept",
            "Directories of ended containers that the agent cannot remove.",
            lambda: front.knowing.clearing.state.value.kept,
        ),
        Gauge(
            "hook_available_bytes",
            "Free bytes of the file system of the containers' directories.",
            lambda: room.value.available,
        ),
        Gauge(
            "hook_available_inodes",
            "Free inodes of the same file system; infinite if it has no limit.",
            lambda: room.value.inodes,
        ),
    )


def _readings(back: Back) -> tuple[Gauge, ...]:
    return (
        _unconfirmed(lambda: back.reconcile.unconfirmed.value),
        Gauge(
            "allocation_drifted",
            "Containers with slices of another GPU because the kubelet did not ask first, and init "
            "containers that the kubelet does not report.",
            lambda: back.reconcile.drifted.value,
        ),
    )


def _unconfirmed(read: Callable[[], float]) -> Gauge:
    return Gauge(
        "allocation_unconfirmed",
        "Answers that the kubelet has not confirmed after 60 s, without init containers.",
        read,
    )
