"""The page at `/`: the tables and sentences of `status` as one HTML document. Pure.

Everything can be read without a script. The script (`page.js`) asks for the page again every 2 s,
by its ETag. Style and script are inside the document, and the policy names their hashes. Its size
is bounded; where rows are left out, the page says where all are.
"""

import base64
import datetime as dt
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Final

from agent import status as view
from agent.errors import cap
from agent.kit.units import Column
from agent.status import StatusDocument

HTML: Final = "text/html; charset=utf-8"
ROWS: Final = 300
"""The most rows of a table."""
ENTRIES: Final = 30
"""The most entries of a list."""
LONGEST: Final = 300
"""Characters of one text. A longer one is cut."""


ID: Final = re.compile(r"\b(?:HA|H|P)-[A-Z0-9]+\b")
"""An id of the runbook, of a refusal, a GPU's fault or a line of `doctor`."""


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

    is_plain = len(foreign) <= LONGEST and foreign.isprintable()  # nearly all are
    return Html(html.escape(foreign if is_plain else cap(foreign, LONGEST)))


def linked(sentence: str) -> Html:
    """The sentence, in which each id is a link to its text of the runbook."""
    return Html(ID.sub(r'<a href="runbook/\g<0>">\g<0></a>', text(sentence)))


def join(parts: Iterable[str]) -> Html:
    """All parts, one after the other."""
    return Html("".join(map(text, parts)))


def fill(template: str, *values: str, **named: str) -> Html:
    """The template, which was written here, with the values in its places."""
    safe = {name: text(value) for name, value in named.items()}
    return Html(template.format(*map(text, values), **safe))


def page_html(status: StatusDocument, now: dt.datetime) -> str:
    """The document."""
    (_, *about), *heads = view.heads(status.node, now)
    # What needs somebody comes first; the others keep their order.
    first = sorted(status.gpus, key=lambda gpu: (gpu.serving, view.gpu_grade(gpu) == ""))
    gpus = [(view.gpu_grade(gpu), view.gpu_cells(gpu)) for gpu in first]
    pods = [("", cells) for cells in view.pod_rows(status, now)]
    is_ready = status.node.ready

    return fill(
        PAGE,
        build=BUILD,
        style=Html(STYLE),
        script=Html(SCRIPT),
        name=status.node.name,
        state="ready" if is_ready else "not ready",
        kind="ok" if is_ready else "bad",
        now=f"{now.astimezone(dt.UTC):%H:%M:%S} UTC",
        summary=view.summary(status),
        heads=join(fill("<p>{}</p>", " · ".join(line)) for line in (about, *heads)),
        notices=_list(view.notices(status, now)),
        gpus=_table(view.GPU_COLUMNS, gpus),
        allocations=_table(view.POD_COLUMNS, pods),
        doubts=_list(view.pod_notices(status)),
        refusals=_list(view.entry_lines(status.refusals or (), now)) or "None.",
        changes=_list(view.entry_lines(status.changes or (), now)) or "None.",
    )


def _table(columns: Sequence[Column], rows: Sequence[tuple[str, Sequence[str]]]) -> Html:
    """A table; each row has a grade. On a narrow screen a row is a box of titles and cells."""
    titles = [column.title for column in columns]
    head = join(fill('<th scope="col">{}</th>', title) for title in titles)
    row = join(fill('<td data-title="{}">{{}}</td>', title) for title in titles)
    body = join(
        fill('<tr class="{}">{}</tr>', grade, fill(row, *cells)) for grade, cells in rows[:ROWS]
    )
    table = fill("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>", head, body)
    return join((table, _more(ROWS, len(rows)))) if rows else Html("<p>There are none.</p>")


def _list(told: Iterable[view.Notice]) -> Html:
    """A list of sentences with their grades; empty if there is none."""
    items = [fill('<li class="{}">{}</li>', grade, linked(said)) for said, grade in told]
    entries = fill("<ul>{}</ul>{}", join(items[:ENTRIES]), _more(ENTRIES, len(items)))
    return entries if items else Html()


def _more(shown: int, count: int) -> Html:
    """Where some are left out: how many there are, and a link to all."""
    said = f"The first {shown} of {count}. All of them: "
    link = '<p>{}<a href="api/v1/status">api/v1/status</a></p>'
    return fill(link, said) if shown < count else Html()
