"""Made-up series of one agent: as it is when all is well, and situations that differ from that."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

MINUTES: Final = 75
TARGET: Final = 'job="hami-agent",instance="10.0.0.1:9394",node="gpu-a"'
CONDITIONS: Final = ("state", "inventory", "server", "registered", "stream", "api_synced")
REASONS: Final = (
    *(
        "api",
        "cdi",
        "driver",
        "gpu_health",
        "gpus",
        "gpus_answering",
        "offer",
        "report",
        "settings",
    ),
    *("web", "web_socket"),
)

Series = Mapping[str, str]


def one(name: str, labels: str = "") -> str:
    """A series of the agent."""
    name = name if name == "up" or name.startswith("process_") else f"hami_agent_{name}"
    return f"{name}{{{','.join(part for part in (TARGET, labels) if part)}}}"


def served(gpu: int, condition: str = "ok", cause: str = "none", runbook: str = "") -> str:
    """The series that says what the health of a GPU means."""
    told = f'gpu="{gpu}",condition="{condition}",cause="{cause}",action="none",runbook="{runbook}"'
    return one("gpu_served", told)


def ready(condition: str) -> str:
    """The series of one condition of readiness."""
    return one("ready", f'condition="{condition}"')


def degraded(reason: str) -> str:
    """The series of one check."""
    return one("degraded", f'reason="{reason}"')


def steady(value: float | str) -> str:
    """The same value in every minute."""
    return " ".join([str(value)] * (MINUTES + 1))


RISING: Final = f"0+1x{MINUTES}"
HEALTHY_SLICES: Final = one("slices", 'gpu="0",state="healthy"')
HELD: Final = 'namespace="team-a",pod="train-0",container="main"'
USED: Final = one("container_memory_used_bytes", f'gpu="0",{HELD}')
IDLE: Final = one("container_idle_seconds", HELD)
BESIDE: Final = 'namespace="team-b",pod="serve-0",container="main"'
REFUSED: Final = one("allocations_total", 'result="refused",reason="no_lock"')


def compute(used: float | str, given: float = 0.3, held: str = HELD, gpu: int = 0) -> Series:
    """What a container uses of a GPU's compute, and what it was given: 0.3 of GPU 0 by default."""
    values = used if isinstance(used, str) else steady(used)
    return {
        one("container_utilization_ratio", f'gpu="{gpu}",{held}'): values,
        one("container_cores_allocated_ratio", f'gpu="{gpu}",{held}'): steady(given),
    }


def policy(name: str, held: str = HELD) -> Series:
    """The series that says when a container's compute limit applies."""
    return {one("container_limits_info", f'{held},keeper="hami-core",policy="{name}"'): steady(1)}


EXCEEDED: Final = "HamiAgentComputeLimitExceeded"
DEFAULT: Final = frozenset(policy("default"))
"""What is not there if the container has another policy."""
NEIGHBOUR: Final = {**compute(0.6, 0.7, BESIDE), **policy("default", BESIDE)}
"""A second container, which keeps within what it was given of the same GPU."""

WELL: Final[Series] = {
    one("up"): steady(1),
    one("process_start_time_seconds"): steady(1000),
    **{ready(condition): steady(1) for condition in CONDITIONS},
    **{degraded(reason): steady(0) for reason in REASONS},
    HEALTHY_SLICES: steady(10),
    one("slices", 'gpu="0",state="unhealthy"'): steady(0),
    served(0): steady(1),
    served(1): steady(1),
    one("allocations_total", 'result="ok",reason=""'): RISING,
    REFUSED: steady(0),
    one("checkpoint_errors_total"): steady(0),
    one("allocation_mismatches_total"): steady(0),
    one("allocation_unconfirmed"): steady(0),
    one("directories_kept"): steady(0),
    USED: steady(2e9),
    IDLE: steady(60),
    **compute(0.3),
    **policy("default"),
    **NEIGHBOUR,
}


@dataclass(frozen=True)
class Situation:
    """What differs from an agent that is well, and which alerts fire, after how many minutes.

    `gone`: series that are not there. `alone`: nothing else is.
    """

    series: Series = field(default_factory=dict)
    alerts: frozenset[str] = frozenset()
    minutes: int = 0
    gone: frozenset[str] = frozenset()
    alone: bool = False

    def present(self) -> Series:
        """All series."""
        well = {} if self.alone else {k: v for k, v in WELL.items() if k not in self.gone}
        return {**well, **self.series}


def fires(alert: str, minutes: int, series: Series, **more: Any) -> Situation:
    return Situation(series, frozenset({alert}), minutes, **more)


SITUATIONS: Final[Mapping[str, Situation]] = {
    "all is well": Situation(),
    "no target": fires("HamiAgentAbsent", 10, {}, alone=True),
    "no answer": fires("HamiAgentDown", 3, {one("up"): steady(0)}, alone=True),
    "restarts": fires(
        "HamiAgentRestarting", 4, {one("process_start_time_seconds"): f"0+60x{MINUTES}"}
    ),
    "the API server was never listed": fires(
        "HamiAgentNotReady", 5, {ready("api_synced"): steady(0)}
    ),
    "a standby": fires(
        "HamiAgentNotReady",
        5,
        {one("up"): steady(1), ready("instance"): steady(0), degraded("web"): steady(0)},
        alone=True,
    ),
    "the kubelet is away": fires(
        "HamiAgentKubeletStreamDown",
        5,
        {ready("stream"): steady(0), ready("registered"): steady(0)},
    ),
    "the state is not writable": fires("HamiAgentStateNotWritable", 1, {ready("state"): steady(0)}),
    "writes of the state fail now and then": fires(
        "HamiAgentStateNotWritable", 2, {one("checkpoint_errors_total"): RISING}
    ),
    "nothing is offered": fires(
        "HamiAgentNothingOffered", 5, {degraded("offer"): steady(1), HEALTHY_SLICES: steady(0)}
    ),
    "the node has no GPU": fires(
        "HamiAgentNothingOffered",
        5,
        {degraded("gpus"): steady(1)},
        gone=frozenset({HEALTHY_SLICES, one("slices", 'gpu="0",state="unhealthy"')}),
    ),
    "a GPU is lost": fires(
        "HamiAgentGpuUnhealthy",
        0,
        {served(1, "lost", "xid", "H-079"): steady(0), degraded("gpu_health"): steady(1)},
        gone=frozenset({served(1)}),
    ),
    "a GPU is silent for long": fires(
        "HamiAgentGpuUnhealthy",
        0,
        {served(1, "unmonitored", "driver", "H-SILENT"): steady(0)},
        gone=frozenset({served(1)}),
    ),
    "a GPU is not monitored": fires(
        "HamiAgentGpuUnmonitored",
        10,
        {served(1, "unmonitored", "monitor", "H-DEAF"): steady(1)},
        gone=frozenset({served(1)}),
    ),
    "pods are refused": fires("HamiAgentAllocationsRefused", 3, {REFUSED: RISING}),
    "another GPU is booked": fires(
        "HamiAgentAllocationMismatch", 1, {one("allocation_mismatches_total"): f"0 1x{MINUTES}"}
    ),
    "answers are not confirmed": fires(
        "HamiAgentAllocationUnconfirmed", 10, {one("allocation_unconfirmed"): steady(2)}
    ),
    "the report fails": fires("HamiAgentReportFailing", 10, {degraded("report"): steady(1)}),
    "the API server is lost": fires("HamiAgentApiServerLost", 10, {degraded("api"): steady(1)}),
    "settings are rejected": fires(
        "HamiAgentSettingsRejected", 5, {degraded("settings"): steady(1)}
    ),
    "directories are kept": fires(
        "HamiAgentDirectoriesKept", 60, {one("directories_kept"): steady(1)}
    ),
    "a door cannot open": fires("HamiAgentDegraded", 30, {degraded("web_socket"): steady(1)}),
    "a container is idle and keeps memory": fires(
        "HamiAgentIdleHolder", 61, {IDLE: f"3600+60x{MINUTES}"}
    ),
    "an idle container keeps little memory of each GPU": fires(
        "HamiAgentIdleHolder",
        0,
        {
            USED: steady(6e8),
            one("container_memory_used_bytes", f'gpu="1",{HELD}'): steady(6e8),
            IDLE: steady(1e5),
        },
    ),
    "an idle container keeps little memory": Situation({USED: steady(6e8), IDLE: steady(1e5)}),
    "another container is idle": Situation(
        {one("container_idle_seconds", HELD.replace("main", "side")): steady(1e5)}
    ),
    "a container takes its neighbour's compute": fires(EXCEEDED, 10, compute(0.5)),
    "it does so in bursts": fires(EXCEEDED, 10, compute("1x4 0.1 " * 15)),
    "a forced limit is exceeded without a neighbour": fires(
        EXCEEDED, 10, {**compute(1), **policy("force")}, gone=DEFAULT | NEIGHBOUR.keys()
    ),
    "a container without a neighbour takes the whole GPU": Situation(
        compute(1), gone=frozenset(NEIGHBOUR)
    ),
    "a container takes the whole GPU while its neighbour rests": Situation(
        {**compute(1), **compute(0, 0.7, BESIDE)}
    ),
    "a container takes the whole GPU, and another one is busy on another GPU": Situation(
        {**compute(1), **compute(0.6, 0.7, BESIDE, gpu=1)}, gone=frozenset(NEIGHBOUR)
    ),
    "a container takes the whole GPU, and the same GPU of another node is busy": Situation(
        {
            **compute(1),
            **{
                name.replace("10.0.0.1", "10.0.0.2").replace("gpu-a", "gpu-b"): values
                for name, values in NEIGHBOUR.items()
            },
        },
        gone=frozenset(NEIGHBOUR),
    ),
    "a container exceeds its limit by little": Situation(compute(0.34)),
    "a container without a limit takes what it gets": Situation(compute(0.9, 0)),
    "a limit that is switched off is exceeded": Situation(
        {**compute(0.9), **policy("disable")}, gone=DEFAULT
    ),
    "a container exceeds its limit for six minutes": Situation(
        compute(f"0.3x10 1x5 0.3x{MINUTES}")
    ),
    "two pods are refused": Situation({REFUSED: f"0 1 2x{MINUTES}"}),
    "one start": Situation({one("process_start_time_seconds"): f"0 60x{MINUTES}"}),
    "a GPU is released": Situation(
        {
            served(1, "unmonitored", "released", "H-RELEASED"): steady(0),
            degraded("gpu_health"): steady(1),
        },
        gone=frozenset({served(1)}),
    ),
    "a GPU is watched": Situation(
        {served(1, "watch", "xid", "H-063"): steady(1)}, gone=frozenset({served(1)})
    ),
    "health checks are off": Situation(
        {served(gpu, "unmonitored", "off", "H-OFF"): steady(1) for gpu in (0, 1)},
        gone=frozenset({served(0), served(1)}),
    ),
    "an observing agent": Situation(
        {degraded("observed"): steady(1)},
        gone=frozenset(map(ready, ("server", "registered", "stream", "api_synced"))),
    ),
    "plain mode": Situation(
        gone=frozenset({ready("api_synced"), degraded("api"), degraded("report")})
    ),
}


def promtools_test(name: str) -> Mapping[str, Any]:
    """One situation as promtool's unit test: which alerts fire, and that none fires before."""
    situation = SITUATIONS[name]
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    expected = [{"labels": f'{{alertname="{one}"}}', "value": 1} for one in situation.alerts]
    late = {"expr": firing, "eval_time": f"{situation.minutes + 1}m", "exp_samples": expected}
    early = {"expr": firing, "eval_time": f"{situation.minutes - 1}m", "exp_samples": []}
    end = {**late, "eval_time": f"{MINUTES}m"}
    lasting = [] if name in PASSING else [end]
    return {
        "name": name,
        "interval": "1m",
        "input_series": [
            {"series": series, "values": values} for series, values in situation.present().items()
        ],
        "promql_expr_test": [*([early] if situation.minutes > 0 else []), late, *lasting],
    }


PASSING: Final = frozenset({"another GPU is booked"})
"""Situations that are over by themselves before the end."""
