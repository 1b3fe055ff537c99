"""The page at `/`: the whole node in one HTML document, made of values in memory. Pure.

This is its only renderer, so that everything can be read without a script. The script (`page.js`)
asks `/api/v1/status` every 2 s whether something changed, by its ETag. If so it loads `/` again and
changes only what differs in the open page: focus, filter, open details and scroll position stay.

Style and script are inside the document, and the policy names their hashes: one request shows the
page, and nothing else may load or run in it. The size is bounded by the number of items of each
list and by the length of each text; where items are left out, the page says how many there are and
links to the JSON.
"""

import base64
import datetime as dt
import hashlib
import html
import itertools
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Final

from agent import status as view
from agent.errors import cap
from agent.kit.units import UNKNOWN, age, counted
from agent.ledger import JournalEntry
from agent.node import Check
from agent.status import GpuStatus, SettingStatus, StatusDocument

HTML: Final = "text/html; charset=utf-8"

ROWS: Final = 300
"""The most rows of a table."""

ENTRIES: Final = 30
"""The most entries of a list: the newest refusals and changes, notices of one kind, checks."""

LONGEST: Final = 300
"""Characters of one text. A longer one is cut."""

WIDTH: Final = 1000
"""Units of a bar."""

HEIGHT: Final = 20
"""Units of a history's height."""

GPU_HEADS: Final = (
    *("GPU", "Model", "Health", "Slices", "Allocated", "Free", "Cores", "Used", "Busy"),
    *("15 minutes", "Identity"),
)
POD_HEADS: Final = (
    *("Pod and container", "GPU", "Memory", "Used", "Cores", "Busy", "Idle", "For", "Kubelet"),
)


SETTING_HEADS: Final = ("Setting", "Value", "From")


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

POLICY: Final = (
    f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The Content-Security-Policy of the page. The only image is its empty icon."""

BUILD: Final = hashlib.sha256(f"{STYLE}{SCRIPT}".encode()).hexdigest()[:12]
"""The script loads the page anew when another build answers."""


def text(foreign: str) -> Html:
    """One line of text: without control characters, cut to LONGEST characters, escaped."""
    if isinstance(foreign, Html):
        return foreign

    if len(foreign) > LONGEST or not foreign.isprintable():
        foreign = cap(foreign, LONGEST)

    return Html(html.escape(foreign))


def join(parts: Iterable[str]) -> Html:
    """All parts, one after the other."""
    return Html("".join(map(text, parts)))


def fill(template: str, *values: str, **named: str) -> Html:
    """The template, which was written here, with the values in its places."""
    safe = {name: text(value) for name, value in named.items()}
    return Html(template.format(*map(text, values), **safe))


def page_html(status: StatusDocument, settings: Sequence[SettingStatus], now: dt.datetime) -> str:
    """The document."""
    node, allocations = status.node, status.allocations or ()
    pods = [(one, share) for one in allocations for share in one.shares]
    refusals, changes = status.refusals or (), status.changes or ()
    (_, *about), *heads = view.heads(node, now)

    since = status.journal_since
    is_young = since is not None and now - since <= dt.timedelta(hours=24)
    known = f" since {since.astimezone(dt.UTC):%H:%M:%S} UTC" if since and is_young else ""

    parts = {"GPUs": status.gpus, "Allocations": pods, "Refusals": refusals, "Changes": changes}
    parts |= {"Checks": node.checks, "Settings": settings}
    link = '<a href="#{}">{} <b>{}</b></a> '

    rows = (_pod(view.pod_cells(one, share, now)) for one, share in pods)
    # What needs somebody comes first; the others keep their order.
    chosen = sorted(settings, key=lambda one: one.origin == "default")
    gpus = sorted(status.gpus, key=lambda gpu: (gpu.serving, view.gpu_grade(gpu) == ""))

    return fill(
        PAGE,
        build=BUILD,
        style=Html(STYLE),
        script=Html(SCRIPT),
        name=node.name,
        state="ready" if node.ready else "not ready",
        kind="tag ok" if node.ready else "tag bad",
        now=f"{now.astimezone(dt.UTC):%H:%M:%S} UTC",
        summary=view.summary(status),
        heads=join(fill("<p>{}</p>", " · ".join(line)) for line in (about, *heads)),
        notices=_notices([*view.notices(status, now), *view.refused(status, now)], "status"),
        parts=join(fill(link, part.lower(), part, str(len(of))) for part, of in parts.items()),
        gpus=_table(GPU_HEADS, map(_gpu, gpus), len(gpus), "gpus"),
        allocations=_table(POD_HEADS, rows, len(pods), "allocations", " id='rows'"),
        doubts=_notices(view.pod_notices(status, now), "allocations"),
        refusals=_entries("refusals", refusals, now, known),
        changes=_entries("changes", changes, now, known),
        checks=_checks(node.checks),
        count=counted(len(settings), "setting"),
        settings=_table(SETTING_HEADS, map(_setting, chosen), len(settings), "settings"),
    )


def _row(heads: Sequence[str], cells: Iterable[str], attributes: str = "") -> Html:
    """A row. On a narrow screen it is a box, in which each value has its head beside it."""
    first, *others = cells
    named = zip(heads[1:], others, strict=True)
    values = join(fill('<td data-head="{}">{}</td>', head, cell) for head, cell in named)
    return Html(f"<tr{attributes}><th>{text(first)}</th>{values}</tr>")


def _table(
    heads: Iterable[str], rows: Iterable[Html], count: int, name: str, attributes: str = ""
) -> Html:
    """A table, and where rows are left out how many there are, with a link to all."""
    if not count:
        return Html('<p class="none">There are none.</p>')

    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = join(itertools.islice(rows, ROWS))
    return Html(
        f'<table class="wide"><thead><tr>{head}</tr></thead><tbody{attributes}>{body}</tbody>'
        f"</table>{_more(ROWS, count, f'api/v1/{name}')}"
    )


def _list(kind: str, items: Sequence[Html], path: str) -> Html:
    """The first items of a list."""
    more = _more(ENTRIES, len(items), path)
    return Html(f'<ul class="{kind}">{join(items[:ENTRIES])}</ul>{more}' if items else "")


def _more(shown: int, count: int, path: str) -> Html:
    """Where items are left out: how many there are, and a link to all."""
    said = f"The first {shown} of {count}. All of them: "
    return Html(f'<p class="more">{said}<a href="{path}">{path}</a></p>' if shown < count else "")


def _notices(told: Iterable[view.Notice], name: str) -> Html:
    items = [fill('<li class="{}">{}</li>', grade, said) for said, grade in told]
    return _list("notices", items, f"api/v1/{name}")


def _gpu(gpu: GpuStatus) -> Html:
    """The row of one GPU, with its memory and the last 15 minutes as drawings."""
    name, model, health, slices, allocated, *amounts = view.gpu_cells(gpu)
    tag = fill('<b class="tag {}">{}</b>', view.gpu_grade(gpu) or "ok", health)
    if not gpu.serving:
        tag = join((tag, Html(' <b class="tag bad">not offered</b>')))

    where = [gpu.uuid, gpu.pci, "" if gpu.numa is None else f"NUMA {gpu.numa}"]
    where += [gpu.mode] if gpu.mode != "hami-core" else []
    identity = " · ".join(filter(None, where))
    drawn = join((allocated, _bar(gpu)))
    cells = (f"GPU {name}", model, tag, slices, drawn, *amounts, _history(gpu), identity)
    return _row(GPU_HEADS, cells, fill(' id="gpu-{}" class="gpu"', gpu.name))


def _pod(cells: Iterable[str]) -> Html:
    """The row of one container and GPU."""
    space, pod, name, *others = cells
    whose = "not known yet" if pod == UNKNOWN else f"{space}/{pod}"
    return _row(POD_HEADS, (fill("{} <i>{}</i>", whose, name), *others))


def _bar(gpu: GpuStatus) -> Html:
    """Allocated memory above, used memory below, on one scale; a mark where the GPU's own ends."""
    most = max(gpu.sellable_mib, gpu.memory_mib or 0, gpu.promised_mib, 1)
    allocated, used, own = (
        round((mib or 0) * WIDTH / most) for mib in (gpu.promised_mib, gpu.used_mib, gpu.memory_mib)
    )
    mark = f'<path class="e" d="M{own - 1} 8H{own + 2}"></path>' if 0 < own < WIDTH else ""

    return Html(
        f'<svg class="bar" viewBox="0 0 {WIDTH} 16" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="p" d="M0 5H{allocated}"></path><path class="u" d="M0 13H{used}"></path>'
        f"{mark}</svg>"
    )


def _history(gpu: GpuStatus) -> Html:
    """How busy the GPU was, as a line and in words."""
    values = gpu.history.gpu_percent if gpu.history else ()
    known = [value for value in values if value is not None]
    if not known:
        return Html()

    line, before = "", None
    for x, value in enumerate(values):
        if value is not None:  # where nothing is known the line has a gap; one value alone is a dot
            y = HEIGHT - round(min(value, 100) * HEIGHT / 100)
            line += f"M{x} {y}h0" if before is None else f"L{x} {y}"

        before = value

    return Html(
        f'<svg class="line" viewBox="0 -1 {len(values) - 1} {HEIGHT + 2}" '
        f'preserveAspectRatio="none" aria-hidden="true"><path d="{line}"></path></svg> '
        f"<span>{min(known)} to {max(known)} %</span>"
    )


def _entries(name: str, entries: Sequence[JournalEntry], now: dt.datetime, known: str) -> Html:
    """Refusals or changes, the newest first. `known`: since when; empty: for all of the time."""
    items = [
        fill(
            '<li><time datetime="{at}" title="{at}">{ago} ago</time> '
            '<b class="tag {grade}">{reason}</b> <span>{about}{said}</span></li>',
            at=f"{entry.at.astimezone(dt.UTC):%Y-%m-%dT%H:%M:%SZ}",
            ago=age(entry.at, now),
            grade="watch" if entry.warning else "",
            reason=entry.reason,
            about=fill("<b>{}: </b>", about) if entry.pod else "",
            said=join((entry.text, f" ({times})" if times else "")),
        )
        for entry, about, times in view.folded(entries)
    ]
    note = f"None{known}."
    if items:
        note = f"Known{known}; the agent's log has earlier ones." if known else ""
    after = fill('<p class="none">{}</p>', note) if note else ""
    return join((_list("entries", items, f"api/v1/{name}"), after))


def _checks(checks: Sequence[Check]) -> Html:
    """A line for each check that fails, the required ones first, and one for all that hold."""
    line, items = '<li><b class="tag {}">{}</b> <span>{}</span></li>', []
    for check in sorted(checks, key=lambda check: not check.required):
        words = ("bad", "not ready") if check.required else ("watch", "degraded")
        if not check.ok:
            items.append(fill(line, *words, f"{check.name}: {check.text}"))

    holding = fill(line, "ok", "ok", ", ".join(check.name for check in checks if check.ok))
    return Html(f"{_list('checks', items, 'readyz?verbose')}<ul class='checks'>{holding}</ul>")


def _setting(one: SettingStatus) -> Html:
    value: str = one.value if isinstance(one.value, str) else json.dumps(one.value)
    if one.pending:
        value = fill("{}<strong> From the next start on.</strong>", value)

    return _row(SETTING_HEADS, (one.key, value, one.origin))
