"""Chooses the node of a pod, or gives the reasons of every candidate.

Source: HAMi v2.10 pkg/scheduler/scheduler.go:Filter, pkg/scheduler/score.go.
"""

import dataclasses
import functools
import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.fit import Groups, Wishes, fit_pod
from agent.sandbox.scheduler.model import RegisteredNode, SchedulerSettings
from agent.sandbox.scheduler.quota import Quotas
from agent.sandbox.scheduler.requests import init_count, pod_requests
from agent.sandbox.scheduler.steering import BadWeightsError, read_steering

NORMAL: Final = "Normal"
WARNING: Final = "Warning"
_TOKEN: Final = re.compile(r"\d+/\d+ (\w+)")


@dataclass(frozen=True, slots=True)
class Notice:
    """An Event to be written about a pod."""

    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Filtered:
    """The answer: the `nodes` that pass, why the others do not, and the shares on the chosen node.

    `groups` is None if nothing was reserved: no fit, an error, or a pod without a GPU request (then
    all candidates pass).
    """

    nodes: tuple[str, ...] = ()
    groups: Groups | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    notices: tuple[Notice, ...] = ()


def filter_pod(
    pod: Json,
    candidates: Sequence[str],
    registered: Mapping[str, RegisteredNode],
    settings: SchedulerSettings,
    rng: random.Random,
    quotas: Quotas | None = None,
) -> Filtered:
    """Choose the node for a pod, at random among equal scores, as by HAMi's map order.

    `registered` holds the usage of all pods but this one.
    """
    requests = pod_requests(pod, settings)
    if not any(requests):
        return Filtered(nodes=tuple(candidates))
    try:
        steering = read_steering(pod["metadata"].get("annotations") or {}, settings)
    except BadWeightsError as bad:
        error = f"calcScore failed {bad} for pod {pod['metadata']['name']}"
        return Filtered(error=error, notices=(Notice(WARNING, "FilteringFailed", error),))
    wishes = Wishes(requests, init_count(pod), steering)
    if quotas is not None:
        fits_quota = functools.partial(quotas.fits, pod["metadata"]["namespace"])
        wishes = dataclasses.replace(wishes, fits_quota=fits_quota)
    failed = {name: "node unregistered" for name in candidates if name not in registered}
    fits: list[tuple[float, str, Groups]] = []
    for name in candidates:
        if name not in registered:
            continue
        node = registered[name]
        answer = fit_pod(node, wishes)
        if answer.groups is None:
            failed[name] = answer.reason
        else:
            fits.append((node.score(), name, answer.groups))
    if not fits:
        return Filtered(failed=failed, notices=_failure_notices(failed))
    rng.shuffle(fits)
    fits.sort(key=lambda fit: fit[0], reverse=steering.node_policy == "spread")
    _, best, groups = fits[-1]
    scores = ",".join(f"{name}:{score:.2f}" for score, name, _ in fits)
    text = f"find fit node({best}), {len(failed)} nodes not fit, {len(fits)} nodes fit({scores})"
    return Filtered((best,), groups, failed, notices=(Notice(NORMAL, "FilteringSucceed", text),))


def _failure_notices(failed: Mapping[str, str]) -> tuple[Notice, ...]:
    nodes: defaultdict[str, list[str]] = defaultdict(list)
    for name, text in sorted(failed.items()):
        for token in text.split(", "):
            if found := _TOKEN.fullmatch(token):
                nodes[found[1]].append(name)
    texts = sorted(
        f"{len(names)} nodes {reason}({','.join(names)})" for reason, names in nodes.items()
    )
    texts.append(f"no available node, {len(failed)} nodes do not meet")
    return tuple(Notice(WARNING, "FilteringFailed", text) for text in texts)
