"""Renders a block for each GPU: promised, used, the last 15 minutes, and its health with cause."""

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

from agent.codec.status_document import AllocationStatus, GpuStatus, UseHistory
from agent.web.page.markup import Html, element, join
from agent.web.page.words import gib, lasting

NAMED: Final = 2
"""Pods that a block names. The table of allocations has all of them."""
NAME_LIMIT: Final = 60
WIDTH: Final = 1000
"""Units of a bar."""
HEIGHT: Final = 20
"""Units of a history's height."""

TO_DO: Final = {
    "wait": "nothing, it clears by itself",
    "inspect": "look at the kernel's log",
    "reset": "reset the GPU",
    "reboot": "reboot the node",
    "replace": "replace the GPU",
}
"""Actions of a health in words."""

PodShares = Mapping[str, int]
"""MiB of one GPU by `namespace/pod`. A pod whose memory is not limited has 0."""


def shares_by_gpu(
    gpus: Iterable[GpuStatus], allocations: Iterable[AllocationStatus]
) -> Mapping[str, PodShares]:
    """What each pod holds of each GPU, by the GPU's UUID, without containers that have ended.

    While a pod's init containers run, the sum can exceed what is promised: see `_bar`.
    """
    whole = {gpu.uuid: gpu.sellable_mib for gpu in gpus}
    found: dict[str, dict[str, int]] = {uuid: {} for uuid in whole}
    for one in (one for one in allocations if not one.ended):
        name = f"{one.namespace}/{one.pod}" if one.pod else "a pod that is not known yet"
        for share in one.shares:
            pods = found.setdefault(share.uuid, {})
            memory = whole.get(share.uuid, 0) if share.memory_mib == 0 else share.memory_mib or 0
            pods[name] = pods.get(name, 0) + memory
    return found


def gpu_block(gpu: GpuStatus, pods: PodShares, now: dt.datetime) -> Html:
    """The block of one GPU."""
    name = gpu.uuid if gpu.index is None else f"GPU {gpu.index}"
    return element(
        "article",
        element("h3", element("span", name), " ", *_tags(gpu), element("small", gpu.model)),
        _bar(gpu, pods),
        element("dl", *_figures(gpu, pods)),
        _history(gpu.history),
        _health(gpu, now),
        element("p", " · ".join(_place(gpu)), class_="id"),
        class_=f"gpu {gpu.condition}",
    )


def _tags(gpu: GpuStatus) -> Iterator[str]:
    tags = [(gpu.condition, gpu.condition)]
    tags += [("cordoned", "watch")] if gpu.cordoned else []
    tags += [] if gpu.serving else [("not offered", "bad")]
    for words, kind in tags:
        yield element("b", words, class_=f"tag {kind}")
        yield " "


def _health(gpu: GpuStatus, now: dt.datetime) -> Html:
    """Why the GPU is not ok or not offered; empty if there is nothing to say."""
    lines: list[Html] = []
    said = gpu.text.removesuffix(f" [{gpu.runbook}]")
    if said:
        since = join(("For ", lasting(gpu.since, now), ": ")) if gpu.since else Html()
        lines.append(element("p", since, said))
    to_do = TO_DO.get(gpu.action, "")
    if to_do or gpu.runbook:
        parts = [f"To do: {to_do}"] if to_do else []
        parts += [f"Runbook: {gpu.runbook}"] if gpu.runbook else []
        lines.append(element("p", element("strong", ". ".join(parts) + ".")))
    lines.extend(element("p", f"Not offered: {obstacle}.") for obstacle in gpu.obstacles)
    return element("div", *lines, class_="why") if lines else Html()


def _bar(gpu: GpuStatus, pods: PodShares) -> Html:
    """Promised memory above, a part for each pod; used memory below, on the same scale."""
    most = max(gpu.sellable_mib, gpu.memory_mib or 0, gpu.promised_mib, 1)
    held = sum(pods.values())
    shrink = min(1.0, gpu.promised_mib / held) if held else 1.0
    ends = [0]
    for memory in pods.values():
        ends.append(ends[-1] + round(memory * shrink * WIDTH / most))
    parts = list(pairwise(ends))
    rest = (ends[-1], round(gpu.promised_mib * WIDTH / most))
    lines = [
        _bar_line("p0", 5, parts[::2]),
        _bar_line("p1", 5, parts[1::2]),
        _bar_line("p2", 5, [rest] if rest[1] > rest[0] + 1 else []),
        _bar_line("u", 13, [(0, round(gpu.used_mib * WIDTH / most))] if gpu.used_mib else []),
    ]
    if gpu.memory_mib and gpu.memory_mib < most:
        edge = round(gpu.memory_mib * WIDTH / most)
        lines.append(_bar_line("e", 8, [(edge - 1, edge + 2)]))
    return element(
        "svg",
        *lines,
        class_="bar",
        viewBox=f"0 0 {WIDTH} 16",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _bar_line(kind: str, y: int, spans: Sequence[tuple[int, int]]) -> Html:
    """Horizontal parts from `start` to `end` each; the style gives the line its thickness."""
    steps = [f"M{start} {y}H{end}" for start, end in spans if end > start]
    return element("path", class_=kind, d="".join(steps)) if steps else Html()


def _figures(gpu: GpuStatus, pods: PodShares) -> Iterator[Html]:
    yield element("dt", "Promised")
    promised = element("b", gib(gpu.promised_mib))
    yield element("dd", promised, f" / {gib(gpu.sellable_mib)} GiB, {gpu.promised_cores} % cores")
    yield element("dt", "Used")
    yield element("dd", *_use(gpu))
    yield element("dt", "Slices")
    held = element("b", str(gpu.slices_held))
    yield element(
        "dd", held, f" / {gpu.slices}", f": {', '.join(_names(tuple(pods)))}" if pods else ""
    )


def _use(gpu: GpuStatus) -> Iterator[str]:
    if gpu.used_mib is None:
        yield "not known"
    else:
        yield element("b", gib(gpu.used_mib))
        yield f" / {gib(gpu.memory_mib)} GiB" if gpu.memory_mib else " GiB"
    if gpu.gpu_percent is not None:
        yield f", {gpu.gpu_percent} % busy"


def _names(pods: Sequence[str]) -> Iterator[str]:
    shown = pods if len(pods) == NAMED + 1 else pods[:NAMED]
    for name in shown:
        yield name if len(name) <= NAME_LIMIT else f"{name[: NAME_LIMIT - 1]}…"
    if len(pods) > len(shown):
        yield f"{len(pods) - len(shown)} more"


def _history(history: UseHistory | None) -> Html:
    """How busy the GPU was, as a line and in words."""
    values = history.gpu_percent if history else ()
    known = [value for value in values if value is not None]
    if history is None or not known:
        return Html()
    minutes = round(len(values) * history.period_seconds / 60)
    lowest, highest = min(known), max(known)
    span = f"{lowest} %" if lowest == highest else f"{lowest} to {highest} %"
    line = element(
        "svg",
        element("path", d="".join(_line(values))),
        class_="line",
        viewBox=f"0 -1 {len(values) - 1} {HEIGHT + 2}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    return element("p", line, " ", element("span", f"{minutes} min: {span} busy"), class_="past")


def _line(values: Sequence[int | None]) -> Iterator[str]:
    """The path of a line with gaps where nothing is known; one value alone is a dot."""
    before: int | None = None
    for x, value in enumerate(values):
        if value is not None:
            y = HEIGHT - round(min(value, 100) * HEIGHT / 100)
            yield f"{'M' if before is None else 'L'}{x} {y}" + ("h0" if before is None else "")
        before = value


def _place(gpu: GpuStatus) -> Iterator[str]:
    yield gpu.uuid
    if gpu.pci:
        yield gpu.pci
    if gpu.numa is not None:
        yield f"NUMA {gpu.numa}"
    if gpu.mode and gpu.mode != "hami-core":
        yield gpu.mode
