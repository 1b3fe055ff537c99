"""What `status`, `top` and the page show of a node, in the same words. Pure.

A text of the cluster is cut and freed of control characters here; a notice has a grade, `bad`,
`watch` or none, which each face shows in its own way.
"""

import datetime as dt
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from agent.errors import cap
from agent.kit.units import UNKNOWN, age, gib, percent
from agent.ledger import JournalEntry
from agent.model import Condition
from agent.status import AllocationStatus, GpuStatus, NodeStatus, ShareStatus, StatusDocument

OF_GPUS: Final = frozenset({"gpu_health", "cdi"})
"""The checks that repeat what the notices about GPUs say."""

SEVERE: Final = frozenset({Condition.BAD, Condition.LOST})
"""The conditions in capitals, of grade `bad`."""

IDLE: Final = dt.timedelta(hours=1)
"""From then on a container without a kernel is pointed out."""

READ_AGAIN: Final = dt.timedelta(seconds=90)
"""Until then the agent may not have read what a new kubelet has on record: it does each minute."""

GPU_NAME: Final = re.compile(r"\bGPU (?:[0-9]+|GPU-[0-9a-f-]+)")
"""A GPU in a sentence."""

ALSO: Final = 5
"""Names beside the first one of equal entries."""

Notice: TypeAlias = tuple[str, str]
"""A sentence, and its grade."""


def heads(node: NodeStatus, now: dt.datetime) -> list[list[str]]:
    """The node and its agent, the settings in force, and the lock if it is held: lines in parts."""
    ready = {True: "READY", False: "NOT READY", None: "by its objects"}[node.ready]
    up = f" up {age(node.started_at, now)}" if node.started_at else ""
    factors = (("memory", node.memory_scaling), ("cores", node.core_scaling))
    lines = [
        [
            f"{cap(node.name)}  {ready}",
            node.version and f"agent {cap(node.version)}{up}",
            node.driver and f"driver {cap(node.driver)}",
            node.kubelet and f"kubelet: {cap(node.kubelet)}",
            "observes only" if node.observe else "",
        ]
    ]

    if node.split_count is not None:
        lines.append(
            [
                f"settings  {node.split_count} slices for each GPU",
                *(f"{name} x{factor:g}" for name, factor in factors if factor is not None),
                f"scheduler {cap(node.scheduler)}",
                cap(node.resource),
                "profiles " + cap(", ".join(node.profiles)) if node.profiles else "",
            ]
        )

    if node.lock is not None:
        held = f" for {age(node.lock.since, now)}" if node.lock.since else ""
        lines.append([f"lock  held by {cap(node.lock.holder) or 'nobody named'}{held}"])

    return [[part for part in line if part] for line in lines]


def summary(found: StatusDocument) -> str:
    """How many slices are in use, and how many GPUs are not offered."""
    held, slices = sum(g.slices_held for g in found.gpus), sum(g.slices for g in found.gpus)
    text = f"{held} of {slices} slices in use"

    if unserved := sum(not gpu.serving for gpu in found.gpus):
        text += f", {unserved} of {len(found.gpus)} GPUs not offered"

    late = sum(one.confirmed is False and not one.ended for one in found.allocations or ())
    return text + (f", {late} not recorded by the kubelet" if late else "")


def gpu_cells(gpu: GpuStatus) -> list[str]:
    """GPU, model, health, slices, allocated, free, cores, used, and how busy it is."""
    word = cap(gpu.health, 16)
    word = word.upper() if word in SEVERE else word

    return [
        UNKNOWN if gpu.index is None else str(gpu.index),
        cap(gpu.model.removeprefix("NVIDIA "), 64) or UNKNOWN,
        f"{word},cordoned" if gpu.cordoned else word or UNKNOWN,
        f"{gpu.slices_held}/{gpu.slices}",
        # 0: it was lost before this start, so its size is not known.
        f"{gib(gpu.promised_mib, '')}/{gib(gpu.sellable_mib or None)}",
        gib(gpu.free_mib),
        f"{gpu.promised_cores}/{percent(gpu.sellable_cores)}",
        gib(gpu.used_mib),
        percent(gpu.gpu_percent),
    ]


def gpu_grade(gpu: GpuStatus) -> str:
    """The grade of the GPU's health."""
    if gpu.condition in SEVERE:
        return "bad"
    return "watch" if gpu.condition not in {"", Condition.OK} else ""


def pod_cells(one: AllocationStatus, share: ShareStatus, now: dt.datetime) -> list[str]:
    """The cells of one container and GPU, and since when it is idle and holds the share."""
    said = {True: "recorded", False: "not recorded", None: UNKNOWN}[one.confirmed]
    said = "other GPUs" if one.mismatched else said

    return [
        cap(one.namespace, 64) or UNKNOWN,
        cap(one.pod, 64) or UNKNOWN,
        cap(one.container, 64) or UNKNOWN,
        cap(share.gpu, 64),
        "all" if share.memory_mib == 0 else gib(share.memory_mib),
        gib(share.used_mib),
        "any" if share.cores == 0 else percent(share.cores),
        percent(share.gpu_percent),
        # HAMi-core does not see each kernel, such as those of CUDA graphs.
        UNKNOWN if is_busy(one) else age(one.last_kernel, now),
        age(one.since, now),
        "ended" if one.ended else said,
    ]


def is_busy(one: AllocationStatus) -> bool:
    """Whether the container uses the compute of a GPU now."""
    return any(share.gpu_percent for share in one.shares)


def idle(found: StatusDocument, now: dt.datetime) -> list[tuple[dt.datetime, str]]:
    """The containers without a kernel for over an hour: since when, and which; longest first."""
    held = (one for one in found.allocations or () if not is_busy(one))
    kernels = ((one.last_kernel, container(one)) for one in held)
    return sorted((at, name) for at, name in kernels if at is not None and now - at >= IDLE)


def notices(found: StatusDocument, now: dt.datetime) -> Iterator[Notice]:
    """What needs a person: GPUs that are not well, checks that fail, and what pods do."""
    yield from gpu_notices(found, now)

    for check in found.node.checks:
        if not check.ok and check.name not in OF_GPUS:
            word, grade = ("not ready", "bad") if check.required else ("degraded", "watch")
            yield f"{word}: {check.name}: {cap(check.text, 1024)}", grade

    since = found.node.kubelet_since
    lost = [
        container(one)
        for one in found.allocations or ()
        if one.confirmed is False and not one.ended and since and one.since and one.since < since
    ]
    if lost and since and now - since >= READ_AGAIN:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        text = f"kubelet: the one that started {age(since, now)} ago has no record of the slices of"
        text += f" {lost[0]}{more}: it has lost its checkpoint. They keep their shares, and are"
        yield f"{text} given the same again when their containers restart", "watch"

    if found_idle := idle(found, now):
        at, longest = found_idle[0]
        some = "1 container has" if len(found_idle) == 1 else f"{len(found_idle)} containers have"
        which = "it is" if len(found_idle) == 1 else "the longest is"
        text = f"idle: {some} run no kernel for over an hour; {which} {longest}, {age(at, now)}"
        yield f"{text}; `hami-agent status --by pod` lists all", ""


def refused(found: StatusDocument, now: dt.datetime) -> Iterator[Notice]:
    """The last refusal of a pod that is still there."""
    # Nothing can be done for a pod that is gone: --since tells of it. An older agent tells of all.
    if refusals := found.refusals if found.standing is None else found.standing:
        last = refusals[0]
        text = f"refused: {len(refusals)} in 24 h, the last {age(last.at, now)} ago"
        yield f"{text}: {cap(last.text, 1024)} [{cap(last.reason)}]", "watch"


def gpu_notices(found: StatusDocument, now: dt.datetime) -> Iterator[Notice]:
    """What is not well about GPUs. Equal words about several GPUs are one sentence."""
    told: dict[Notice, list[str]] = {}

    for gpu in found.gpus:
        which = cap(gpu.name)
        said = [(f"is not offered: {cap(text, 1024)}", "watch") for text in gpu.obstacles]

        if grade := gpu_grade(gpu):
            since = f" for {age(gpu.since, now)}" if gpu.since else ""
            until = gpu.offered_until
            left = f"; offered for {age(now, until)} more" if until else ""
            act = f"; action: {cap(gpu.action)}" if gpu.action not in {"", "none"} else ""
            why = cap(gpu.text or gpu.cause, 1024)
            said.insert(0, (f"{cap(gpu.health)}{since}: {why}{left}{act}", grade))

        if gpu.cordoned:
            act = f"`hami-agent uncordon {which} --node {cap(found.node.name)}` ends it"
            said.append((f"is cordoned: the scheduler places no new pod; {act}", ""))

        for notice in said:
            told.setdefault(notice, []).append(which)

    for (text, grade), gpus in told.items():
        be, _, rest = text.partition(" ")
        be = "are" if be == "is" and len(gpus) > 1 else be
        yield f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(gpus)} {be} {rest}", grade


def pod_notices(found: StatusDocument, now: dt.datetime) -> Iterator[str]:
    """What a person should know of containers, beside their cells."""
    for one in found.allocations or ():
        if one.unkept and not one.ended:
            yield f"nothing keeps the limits of {container(one)}: {cap(one.unkept)}"

        if one.unread and not one.ended:
            yield f"the use of {container(one)} is not known: {cap(one.unread)}"

    for at, name in idle(found, now):
        yield f"idle for {age(at, now)}: {name}"


def container(one: AllocationStatus) -> str:
    """The container's name with its pod's, for people."""
    return "/".join(cap(name, 64) for name in (one.namespace, one.pod, one.container))


def folded(entries: Iterable[JournalEntry]) -> list[tuple[JournalEntry, str, str]]:
    """Refusals or changes; equal ones, except for pod or GPU, are one.

    Each is the newest, what it is about, and of the others their number and what they are about.
    """
    groups: dict[tuple[str, str], list[JournalEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.reason, GPU_NAME.sub("", entry.text, 1)), []).append(entry)

    return [(newest, _about(newest), _times(newest, older)) for newest, *older in groups.values()]


def _times(newest: JournalEntry, older: Sequence[JournalEntry]) -> str:
    others = [name for name in dict.fromkeys(map(_about, older)) if name != _about(newest)]
    also = f"; also {', '.join(others[:ALSO])}" if others else ""
    also += f" and {len(others) - ALSO} more" if len(others) > ALSO else ""
    return f"{len(older) + 1} times{also}" if older else ""


def _about(entry: JournalEntry) -> str:
    """The pod or container, or the GPU that the sentence names."""
    gpu = GPU_NAME.search(entry.text)
    parts = (entry.namespace, entry.pod, entry.container)
    return cap("/".join(filter(None, parts))) or (gpu[0] if gpu else "")
