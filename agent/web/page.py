"""The page at `/`: the whole node in one HTML document, made of values in memory.

This is its only renderer, so that everything can be read without a script. The script (`page.js`)
asks `/api/v1/status` every 2 s whether something changed, by its ETag. If so it loads `/` again and
changes only what differs in the open page: focus, filter, open details and scroll position stay.

Style and script are inside the document, and the policy names their hashes: one request shows the
page, and nothing else may load or run in it. The size is bounded by the number of rows of each list
and by the length of each text; where rows are left out, the page says how many there are and links
to the JSON.
"""

import asyncio
import base64
import datetime as dt
import hashlib
import html
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib import resources
from typing import Final

import msgspec
from aiohttp import web

from agent.errors import cap
from agent.kit.units import age, counted, gib
from agent.ledger import JournalEntry
from agent.model import ReaderPolicy
from agent.node.findings import Check
from agent.status import (
    AllocationStatus,
    GpuStatus,
    NodeStatus,
    SettingStatus,
    ShareStatus,
    StatusDocument,
    StatusFacts,
    UseHistory,
    status_of,
)
from agent.web.api import refuse_reader

KEPT: Final = 0.5
"""Seconds for which a rendering is reused: many readers cost the loop no more than one."""

GPUS: Final = 32
CONTAINERS: Final = 300
"""The most GPUs, and the most containers, that are shown."""

ENTRIES: Final = 30
"""The newest of the refusals, and of the changes."""

CHECKS: Final = 40
SETTINGS: Final = 200
"""The most checks, and the most settings, that are shown."""

LONGEST: Final = 300
"""Characters of one text. A longer one is cut."""

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

HEADS: Final = ("Pod and container", "GPU", "Memory", "Cores", "Idle", "For")
"""The heads of the table of containers."""

GPU_NAME: Final = re.compile(r"\bGPU (?:[0-9]+|GPU-[0-9a-f-]+)")
"""A GPU in a sentence."""

ALSO: Final = 5
"""Names beside the first one of equal entries."""


class Html(str):
    """Markup that was made here. Any other text is escaped."""

    __slots__ = ()


def _asset(name: str) -> str:
    lines = resources.files(__package__).joinpath(name).read_text(encoding="utf-8").splitlines()
    return "\n".join(line.strip() for line in lines)


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


STYLE: Final = _asset("page.css")
SCRIPT: Final = _asset("page.js")

PAGE: Final = _asset("page.html") + "\n"
"""The document; what changes has its place in braces."""

LEGEND: Final = Html(
    '<p class="legend">Memory: <b class="key p">promised</b> above, <b class="key u">used</b> '
    'below; <b class="key e">the GPU\'s own</b> ends at the mark. The line shows how busy it was.'
    "</p>"
)
"""What the drawings in the block of each GPU mean."""

GPU_BLOCK: Final = (
    '<article id="{anchor}" class="gpu {condition}">'
    "<h3><span>{name}</span> {tags}<small>{model}</small></h3>{bar}"
    "<dl><dt>Promised</dt><dd>{promised}</dd><dt>Used</dt><dd>{used}</dd>"
    "<dt>Slices</dt><dd>{slices}</dd></dl>"
    '{history}{why}<p class="id">{place}</p></article>'
)
"""The block of one GPU."""

FILTER: Final = Html(
    '<p id="filtering" hidden><label for="filter">Filter by pod, container or GPU</label> '
    '<input id="filter" type="search" autocomplete="off" data-own> '
    '<span id="shown" role="status" data-own></span></p>'
)
"""Hidden until the script runs."""

POLICY: Final = (
    f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The Content-Security-Policy of the page. The only image is its empty icon."""

BUILD: Final = hashlib.sha256(f"{STYLE}{SCRIPT}".encode()).hexdigest()[:12]
"""The script loads the page anew when another build answers."""


class PageDoor(msgspec.Struct, eq=False):
    """Answers `/`.

    `facts` is read for each rendering, without waiting; None: there is none yet. `body` is the last
    rendering, and `until` the loop time of its reuse.
    """

    facts: Callable[[], StatusFacts | None]
    readers: ReaderPolicy = ReaderPolicy.LOCAL
    body: bytes = b""
    until: float = 0.0

    def page(self, request: web.BaseRequest) -> web.Response:
        """Answer a GET or HEAD, with the page of now or of the last KEPT seconds."""
        refused = refuse_reader(request, self.readers)
        if refused is not None:
            return refused

        now = asyncio.get_running_loop().time()
        if not self.body or self.until <= now:
            facts = self.facts()
            if facts is None:
                text = "This agent stands by; this page tries again every 3 s."
                later = {"Retry-After": "3", "Refresh": "3"}  # a browser asks again by itself
                return web.Response(status=503, text=f"{text}\n", headers=later)

            self.body = page_html(status_of(facts), facts.settings(), facts.now).encode()
            self.until = now + KEPT

        headers = {"Content-Security-Policy": POLICY}
        return web.Response(
            body=self.body, content_type="text/html", charset="utf-8", headers=headers
        )


def text(foreign: str) -> Html:
    """One line of text: without control characters, cut to LONGEST characters, escaped."""
    if isinstance(foreign, Html):
        return foreign

    if len(foreign) > LONGEST or not foreign.isprintable():
        foreign = cap(foreign, LONGEST)

    return Html(html.escape(foreign))


def join(*parts: str) -> Html:
    """All parts, one after the other."""
    return Html("".join(map(text, parts)))


def fill(template: str, *values: str, **named: str) -> Html:
    """The template, which was written here, with the values in its places."""
    safe = {name: text(value) for name, value in named.items()}
    return Html(template.format(*map(text, values), **safe))


def page_html(status: StatusDocument, settings: Sequence[SettingStatus], now: dt.datetime) -> str:
    """The document."""
    node, since = status.node, status.journal_since
    young = since is not None and now - since <= dt.timedelta(hours=24)
    none = f"None since {clock(since)}." if since and young else "None."

    state, kind = ("not ready", "tag bad") if not node.ready else ("ready", "tag ok")
    if node.ready and not all(gpu.serving for gpu in status.gpus):
        kind = "tag watch"

    failing = [check for check in node.checks if not check.ok]
    grave = "why" if any(check.required for check in failing) else "why slight"

    parts = {
        "GPUs": len(status.gpus),
        "Allocations": len(status.allocations or ()),
        "Refusals": len(status.refusals or ()),
        "Changes": len(status.changes or ()),
        "Checks": len(node.checks),
        "Settings": len(settings),
    }

    sentence = fill('<p class="sum">{}</p>', join(*_sentence(status.gpus)))

    return fill(
        PAGE,
        build=BUILD,
        style=Html(STYLE),
        script=Html(SCRIPT),
        name=node.name,
        kind=kind,
        state=state,
        now=clock(now),
        sentence=sentence if status.gpus else "",
        facts=join(*_facts(node, now)),
        failing=fill('<div class="{}">{}</div>', grave, _checks(failing)) if failing else "",
        parts=join(
            *(
                fill('<a href="#{}">{} <b>{}</b></a> ', part.lower(), part, str(count))
                for part, count in parts.items()
            )
        ),
        gpus=_gpus(status.gpus, now),
        allocations=_allocations(status.allocations or (), now),
        refusals=_entries("refusals", status.refusals or (), now, none),
        changes=_entries("changes", status.changes or (), now, none),
        checks=_checks(node.checks),
        settings=_settings(settings),
    )


def _sentence(gpus: Sequence[GpuStatus]) -> Iterator[str]:
    """How many GPUs serve, and which do not, each with a link to its block."""
    serving = sum(gpu.serving for gpu in gpus)
    yield f"{serving} of {counted(len(gpus), 'GPU')} can be given to new containers."

    for gpu in gpus:
        if not gpu.serving or gpu.condition != "ok":
            states = (gpu.condition, "" if gpu.serving else "not offered")
            words = ", ".join(word for word in states if word not in {"", "ok"})
            yield fill(' <a href="#{}">{}</a>: {}.', _anchor(gpu), _name(gpu), words)


def _name(gpu: GpuStatus) -> str:
    return gpu.uuid if gpu.index is None else f"GPU {gpu.index}"


def _anchor(gpu: GpuStatus) -> str:
    return f"gpu-{gpu.uuid if gpu.index is None else gpu.index}"


def _facts(node: NodeStatus, now: dt.datetime) -> Iterator[Html]:
    up = f"up {age(node.started_at, now)}" if node.started_at else ""
    agent = (node.version, up, "observes only" if node.observe else "")

    checks = {check.name: check for check in node.checks}
    watched = [checks[name] for name in ("api_synced", "api") if name in checks]
    api = "watched" if "api" in checks else "not needed"
    api = next((check.text for check in watched if not check.ok), api)

    lock: str = "free"
    if node.lock is not None and node.lock.since is None:
        lock = f"not readable: {node.lock.holder}"
    elif node.lock is not None and node.lock.since is not None:
        holder = node.lock.holder or "a pod that it does not name"
        lock = join(f"held by {holder} for ", _time(age(node.lock.since, now), node.lock.since))

    sharing = f"{counted(node.split_count or 0, 'slice')} of {node.resource} per GPU"
    for name, factor in (("memory", node.memory_scaling), ("cores", node.core_scaling)):
        sharing += f", {name} x{factor:g}" if factor not in {None, 1} else ""

    sharing += f", profile {', '.join(node.profiles)}" if node.profiles else ""

    facts = {
        "Agent": ", ".join(filter(None, agent)),
        "Kubelet": node.kubelet or "registered, takes the lists",
        "API server": api,
        "Node lock": lock,
        "Driver": node.driver or "not known",
        "Sharing": sharing,
    }
    for name, value in facts.items():
        yield fill("<div><dt>{}</dt><dd>{}</dd></div>", name, value)


def _gpus(gpus: Sequence[GpuStatus], now: dt.datetime) -> Html:
    if not gpus:
        return Html('<p class="none">There are no GPUs to share.</p>')

    # What needs somebody comes first; the others keep their order.
    first = sorted(gpus, key=lambda gpu: (gpu.serving, gpu.condition == "ok"))
    blocks = join(*(_gpu(gpu, now) for gpu in first[:GPUS]))

    return fill('{}<div class="gpus">{}</div>{}', LEGEND, blocks, _more(gpus, GPUS, "api/v1/gpus"))


def _gpu(gpu: GpuStatus, now: dt.datetime) -> Html:
    """The block of one GPU: promised, used, the last 15 minutes, and its health with cause."""
    tags = [(gpu.condition, gpu.condition)]
    tags += [("cordoned", "watch")] if gpu.cordoned else []
    tags += [] if gpu.serving else [("not offered", "bad")]

    used = "not known" if gpu.used_mib is None else gib(gpu.used_mib)
    if gpu.used_mib is not None and gpu.memory_mib:
        used = f"{gib(gpu.used_mib, '')} / {gib(gpu.memory_mib)}"

    used += "" if gpu.gpu_percent is None else f", {gpu.gpu_percent} % busy"
    given = f"{gib(gpu.promised_mib, '')} / {gib(gpu.sellable_mib)}, {gpu.promised_cores} % cores"

    # Why it is not ok or not offered.
    notes: list[Html] = []
    if said := gpu.text.removesuffix(f" [{gpu.runbook}]"):
        since = join("For ", _time(age(gpu.since, now), gpu.since), ": ") if gpu.since else ""
        notes.append(fill("<p>{}{}</p>", since, said))

    to_do = [f"To do: {TO_DO[gpu.action]}."] if gpu.action in TO_DO else []
    to_do += [f"Runbook: {gpu.runbook}."] if gpu.runbook else []
    notes += [fill("<p><strong>{}</strong></p>", " ".join(to_do))] if to_do else []
    notes += [fill("<p>Not offered: {}.</p>", obstacle) for obstacle in gpu.obstacles]

    place = [gpu.uuid, gpu.pci, "" if gpu.numa is None else f"NUMA {gpu.numa}"]
    place += [gpu.mode] if gpu.mode != "hami-core" else []

    return fill(
        GPU_BLOCK,
        anchor=_anchor(gpu),
        condition=gpu.condition,
        name=_name(gpu),
        tags=join(*(fill('<b class="tag {}">{}</b> ', kind, words) for words, kind in tags)),
        model=gpu.model,
        bar=_bar(gpu),
        promised=given,
        used=used,
        slices=f"{gpu.slices_held} / {gpu.slices}",
        history=_history(gpu.history),
        why=fill('<div class="why">{}</div>', join(*notes)) if notes else "",
        place=" · ".join(filter(None, place)),
    )


def _bar(gpu: GpuStatus) -> Html:
    """Promised memory above, used memory below, on one scale; a mark where the GPU's own ends."""
    most = max(gpu.sellable_mib, gpu.memory_mib or 0, gpu.promised_mib, 1)
    promised, used, own = (
        round((mib or 0) * WIDTH / most) for mib in (gpu.promised_mib, gpu.used_mib, gpu.memory_mib)
    )
    mark = f'<path class="e" d="M{own - 1} 8H{own + 2}"></path>' if 0 < own < WIDTH else ""

    return Html(
        f'<svg class="bar" viewBox="0 0 {WIDTH} 16" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="p" d="M0 5H{promised}"></path><path class="u" d="M0 13H{used}"></path>'
        f"{mark}</svg>"
    )


def _history(history: UseHistory | None) -> Html:
    """How busy the GPU was, as a line and in words."""
    values = history.gpu_percent if history else ()
    known = [value for value in values if value is not None]
    if history is None or not known:
        return Html()

    line, before = "", None
    for x, value in enumerate(values):
        if value is not None:  # where nothing is known the line has a gap; one value alone is a dot
            y = HEIGHT - round(min(value, 100) * HEIGHT / 100)
            line += f"M{x} {y}h0" if before is None else f"L{x} {y}"

        before = value

    minutes = round(len(values) * history.period_seconds / 60)
    lowest, highest = min(known), max(known)
    busy = f"{lowest} %" if lowest == highest else f"{lowest} to {highest} %"

    return Html(
        f'<p class="past"><svg class="line" viewBox="0 -1 {len(values) - 1} {HEIGHT + 2}" '
        f'preserveAspectRatio="none" aria-hidden="true"><path d="{line}"></path></svg> '
        f"<span>{minutes} min: {busy} busy</span></p>"
    )


def _allocations(allocations: Sequence[AllocationStatus], now: dt.datetime) -> Html:
    if not allocations:
        return Html('<p class="none">No container holds a share.</p>')

    rows = []
    for one in allocations[:CONTAINERS]:
        pod = f"{one.namespace}/{one.pod}" if one.pod else "not known yet"

        cells = (
            ", ".join(share.gpu for share in one.shares),
            _amounts([_memory(share) for share in one.shares]),
            _amounts([_cores(share) for share in one.shares]),
            age(one.last_kernel, now) if one.last_kernel else "",
            age(one.since, now) if one.since else "",
        )

        # On a narrow screen each row is a box, in which each value has its head beside it.
        named = zip(HEADS[1:], cells, strict=True)
        values = join(*(fill('<td data-head="{}">{}</td>', head, cell) for head, cell in named))
        doubts = join(*_doubts(one))
        rows.append(fill("<tr><th>{} <i>{}</i>{}</th>{}</tr>", pod, one.container, doubts, values))

    more = _more(allocations, CONTAINERS, "api/v1/allocations")
    return join(FILTER, _table(HEADS, rows, ' id="rows"'), more)


def _doubts(one: AllocationStatus) -> list[Html]:
    """What is wrong with the container's share; nothing is, once it has ended."""
    if one.ended:
        return [Html("<i> It has ended.</i>")]

    said = {
        " The kubelet booked another GPU (HA-4006).": one.mismatched,
        " The kubelet has not recorded the answer yet.": one.confirmed is False,
        f" Nothing keeps its limits: {one.unkept}.": one.unkept,
        f" Its use is not known: {one.unread}.": one.unread,
    }
    return [fill("<strong>{}</strong>", words) for words, is_so in said.items() if is_so]


def _memory(share: ShareStatus) -> str:
    limit = gib(share.memory_mib) if share.memory_mib else ""
    used = "" if share.used_mib is None else gib(share.used_mib, "")
    if used and limit:
        return f"{used} of {limit}"

    without = "no limit" if share.memory_mib is None else "all"
    return f"{used} GiB, {without}" if used else limit or without


def _cores(share: ShareStatus) -> str:
    """The same of the GPU's compute, and whether it is more than was asked for."""
    limit = f"{share.cores} %" if share.cores else ""
    used = "" if share.gpu_percent is None else f"{share.gpu_percent}"
    if used and limit:
        return f"{used} of {limit}{', over' if int(used) > (share.cores or 0) else ''}"

    return f"{used} %, no limit" if used else limit or "no limit"


def _amounts(amounts: Sequence[str]) -> str:
    """Equal amounts once with their number, different ones all."""
    if len(amounts) < 2 or len(set(amounts)) > 1:
        return ", ".join(amounts)

    return f"{len(amounts)} x {amounts[0]}" if amounts[0][0].isdigit() else amounts[0]


def _entries(name: str, entries: Sequence[JournalEntry], now: dt.datetime, none: str) -> Html:
    """Refusals or changes, the newest first; equal ones, but for pod or GPU, are one."""
    if not entries:
        return fill('<p class="none">{}</p>', none)

    groups: dict[tuple[str, str], list[JournalEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.reason, GPU_NAME.sub("", entry.text, 1)), []).append(entry)

    rows = []
    for newest, *older in list(groups.values())[:ENTRIES]:
        others = [name for name in dict.fromkeys(map(_about, older)) if name != _about(newest)]
        also = f" Also: {', '.join(others[:ALSO])}" if others else ""
        also += f" and {len(others) - ALSO} more" if len(others) > ALSO else ""

        rows.append(
            fill(
                '<li>{at} <b class="{kind}">{reason}</b> {times} <span>{holder}{said}</span></li>',
                at=_time(f"{age(newest.at, now)} ago", newest.at),
                kind="tag watch" if newest.warning else "tag",
                reason=newest.reason,
                times=fill('<b class="tag">{} times</b>', str(len(older) + 1)) if older else "",
                holder=fill("<b>{}: </b>", _about(newest)) if newest.pod else "",
                said=join(newest.text, also),
            )
        )

    more = _more(groups, ENTRIES, f"api/v1/{name}")
    return fill('<ul class="entries">{}</ul>{}', join(*rows), more)


def _about(entry: JournalEntry) -> str:
    gpu = GPU_NAME.search(entry.text)
    parts = (entry.namespace, entry.pod, entry.container)
    return "/".join(filter(None, parts)) or (gpu[0] if gpu else "")


def _checks(checks: Sequence[Check]) -> Html:
    """The readiness checks: a line for each that fails, and one for all that hold."""
    failing = sorted((each for each in checks if not each.ok), key=lambda each: not each.required)
    rows = [
        fill(
            '<li><b class="tag {}">{}</b> <span><b>{}</b>: {}</span></li>',
            *(("bad", "not ready") if check.required else ("watch", "degraded")),
            check.name,
            check.text,
        )
        for check in failing[:CHECKS]
    ]
    if holding := ", ".join(check.name for check in checks if check.ok):
        rows.append(fill('<li><b class="tag ok">ok</b> <span>{}</span></li>', holding))

    more = _more(failing, CHECKS, "readyz?verbose")
    return fill('<ul class="checks">{}</ul>{}', join(*rows), more)


def _settings(settings: Sequence[SettingStatus]) -> Html:
    """The settings in force, each with its origin; those that somebody chose come first."""
    rows = []
    for one in sorted(settings, key=lambda one: one.origin == "default")[:SETTINGS]:
        value = "none" if one.value in (None, "", [], ()) else str(one.value)
        if isinstance(one.value, bool):
            value = "true" if one.value else "false"
        elif one.value and isinstance(one.value, list | tuple):
            value = ", ".join(map(str, one.value))

        late = Html("<strong> From the next start on.</strong>") if one.pending else ""
        row = "<tr><th>{}</th><td>{}{}</td><td>{}</td></tr>"
        rows.append(fill(row, one.key, value, late, one.origin))

    return fill(
        "<details><summary>{}, each with origin</summary>{}{}</details>",
        counted(len(settings), "setting"),
        _table(("Setting", "Value", "From"), rows),
        _more(settings, SETTINGS, "api/v1/settings"),
    )


def _table(heads: Iterable[str], rows: Iterable[Html], attribute: str = "") -> Html:
    """A table; `attribute` stands in its body."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return Html(
        f'<table class="wide"><thead><tr>{head}</tr></thead>'
        f"<tbody{attribute}>{join(*rows)}</tbody></table>"
    )


def _more(items: Collection[object], most: int, path: str) -> Html:
    """Where items are left out: how many there are, and a link to all."""
    if len(items) <= most:
        return Html()

    said = f"The first {most} of {len(items)}. All of them: "
    return Html(f'<p class="more">{said}<a href="{path}">{path}</a></p>')


def _time(words: str, at: dt.datetime) -> Html:
    """The words, with the time itself for programs and as a tooltip."""
    utc = at.astimezone(dt.UTC)
    return fill(
        '<time datetime="{}" title="{}">{}</time>',
        utc.strftime("%Y-%m-%dT%H:%M:%SZ"),
        utc.strftime("%Y-%m-%d %H:%M:%S UTC"),
        words,
    )


def clock(at: dt.datetime) -> str:
    """The time of day, in UTC."""
    return at.astimezone(dt.UTC).strftime("%H:%M:%S UTC")
