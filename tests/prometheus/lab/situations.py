"""The situations of situations.txt as promtool's own tests."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

MINUTES: Final = 75
TARGET: Final = 'job="hami-agent",instance="10.0.0.1:9394",node="gpu-a"'
LABELS: Final = {
    "ready": "condition",
    "degraded": "reason",
    "slices": "gpu state",
    "gpu_served": "gpu condition cause action runbook",
    "allocations_total": "result reason",
    "container_memory_used_bytes": "gpu held",
    "container_idle_seconds": "held",
    "container_utilization_ratio": "gpu held",
    "container_cores_allocated_ratio": "gpu held",
    "container_limits_info": "held keeper policy",
}
HELD: Final = {
    "train": 'namespace="team-a",pod="train-0",container="main"',
    "side": 'namespace="team-a",pod="train-0",container="side"',
    "serve": 'namespace="team-b",pod="serve-0",container="main"',
}
NEIGHBOUR: Final = (
    "container_utilization_ratio:0:serve=0.6",
    "container_cores_allocated_ratio:0:serve=0.7",
    "container_limits_info:serve:hami-core:default=1",
)
LINES: Final = Path(__file__).with_name("situations.txt").read_text().splitlines()
SITUATIONS: Final = dict(line.split(" =>") for line in LINES if " =>" in line)
"""By name: the alert and its minutes, a bar, and the series."""


def one(word: str) -> str:
    """A series of the agent, from its name and the values of its labels."""
    name, *values = word.split(":")
    told = zip(LABELS.get(name, "").split(), values, strict=True)
    labels = [HELD[text] if label == "held" else f'{label}="{text}"' for label, text in told]
    name = name if name == "up" or name.startswith("process_") else f"hami_agent_{name}"
    return f"{name}{{{','.join((TARGET, *labels))}}}"


def values_of(text: str) -> str:
    """One value for each minute, in promtool's notation."""
    shorts = {"rise": f"0+1x{MINUTES}", "bursts": "1x4 0.1 " * 15}
    steady = f"{text}x{MINUTES}"
    return shorts.get(text, text.replace("_", " ") if {*"x_"} & {*text} else steady)


def changed(series: Mapping[str, str], words: Iterable[str]) -> dict[str, str]:
    """The series after these words."""
    found = dict(series)
    for word in words:
        match word.partition("="):
            case "-all", _, _:
                found.clear()
            case "-neighbour", _, _:
                found = {name: text for name, text in found.items() if HELD["serve"] not in name}
            case "neighbour" | "neighbour@b", _, _:
                for name, text in changed({}, NEIGHBOUR).items():
                    there = name.replace("10.0.0.1", "10.0.0.2").replace("gpu-a", "gpu-b")
                    found[there if word.endswith("@b") else name] = text
            case name, "=", text:
                found[one(name)] = values_of(text)
            case name, _, _:
                del found[one(name.removeprefix("-"))]
    return found


def promtools_test(name: str) -> Mapping[str, Any]:
    """One situation as promtool's unit test: which alert fires, and that none fires before."""
    alert, _, changes = SITUATIONS[name].partition("|")
    told, minutes, *_ = *alert.split(), "", "0"
    well = [word for line in LINES if line.startswith("well: ") for word in line.split()[1:]]
    expected = [{"labels": f'{{alertname="{told}"}}', "value": 1}] if told else []
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    late = {"expr": firing, "eval_time": f"{int(minutes) + 1}m", "exp_samples": expected}
    early = {"expr": firing, "eval_time": f"{int(minutes) - 1}m", "exp_samples": []}
    end = {**late, "eval_time": f"{MINUTES}m"}
    series = changed(changed({}, well), changes.split())
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [
            *([early] if int(minutes) else []),
            late,
            *([] if name.endswith("which passes") else [end]),
        ],
    }
