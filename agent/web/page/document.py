"""Renders the whole page from the status document, in at most LARGEST bytes.

The page has one renderer, this one. Its script (`script.js`) holds no template: when the stream
`/api/v1/status?watch=etag` says that something is new, the script fetches `/` again and changes
only the nodes of the page that differ, so that focus, filter, open details and scroll stay. A
stream of its own with rendered parts would save bytes on loopback and need a second door.

Style and script are inside the document, and the policy names their hashes: one request shows the
page, and nothing else may run in it. Where something is left out for want of room, the page says so
and links to the JSON. The lists share the room: allocations get what the others leave, and
refusals and changes what these leave.
"""

import base64
import datetime as dt
import hashlib
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Final

import msgspec

from agent.codec.status_document import NodeStatus, SettingStatus, StatusDocument
from agent.web.page.gpu_blocks import gpu_block, shares_by_gpu
from agent.web.page.lists import (
    allocations_table,
    checks_list,
    entries_list,
    listed,
    settings_table,
)
from agent.web.page.markup import Html, element, join, size
from agent.web.page.words import age, clock, counted, lasting

LARGEST: Final = 60_000
"""Bytes of the document."""
GPU_ROOM: Final = 23_000
ENTRIES_ROOM: Final = 3_500
MOST_ENTRIES_ROOM: Final = 9_000
"""For refusals and for changes, where the others leave so much."""
CHECKS_ROOM: Final = 2_000
SETTINGS_ROOM: Final = 6_000
FEWEST: Final = 4_000
"""Bytes that allocations have at least. All of these, style and script fit into LARGEST."""


def _asset(name: str) -> Html:
    lines = resources.files(__package__).joinpath(name).read_text(encoding="utf-8").splitlines()
    return Html("\n".join(line.strip() for line in lines))


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


STYLE: Final = _asset("style.css")
SCRIPT: Final = _asset("script.js")
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_hash(STYLE)}",
        f"script-src {_hash(SCRIPT)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""The Content-Security-Policy of the page. The only image is its empty icon."""
BUILD: Final = hashlib.sha256(f"{STYLE}{SCRIPT}".encode()).hexdigest()[:12]
"""The script loads the page anew when another build answers."""


def page_html(status: StatusDocument, settings: Sequence[SettingStatus], now: dt.datetime) -> str:
    """The document."""
    return _PageRenderer(status, settings, now).html()


class _PageRenderer(msgspec.Struct, frozen=True):
    """One rendering: the status, the settings in force, and the time."""

    status: StatusDocument
    settings: Sequence[SettingStatus]
    now: dt.datetime

    def html(self) -> str:
        """The document."""
        header, gpus, checks, settings = (
            self._header(),
            self._gpus(),
            self._checks(),
            self._settings(),
        )

        def whole(allocations: Html, refusals_room: int, changes_room: int) -> Html:
            refusals = self._entries("refusals", "Refusals of the last 24 h", refusals_room)
            changes = self._entries("changes", "Changes of the last 24 h", changes_room)
            beside = element("div", refusals, changes, checks, settings)
            return self._framed(header, element("main", gpus, allocations, beside))

        def left(allocations: Html, refusals_room: int, changes_room: int) -> int:
            return LARGEST - size(whole(allocations, refusals_room, changes_room))

        room = max(FEWEST, left(Html(), ENTRIES_ROOM, ENTRIES_ROOM))
        allocations = self._allocations(room)
        refusals = min(MOST_ENTRIES_ROOM, left(allocations, 0, 0) // 2)
        changes = min(MOST_ENTRIES_ROOM, left(allocations, refusals, 0))
        return whole(allocations, refusals, changes)

    def _framed(self, header: Html, main: Html) -> Html:
        head = element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            element("link", rel="icon", href="data:,"),
            element("title", f"{self.status.node.name}: GPUs"),
            element("style", STYLE),
        )
        body = element("body", header, main, self._footer(), element("script", SCRIPT))
        page = element("html", head, body, lang="en", data_build=BUILD)
        return Html(f"<!DOCTYPE html>\n{page}\n")

    def _header(self) -> Html:
        node = self.status.node
        state = element("b", "ready", class_="tag ok")
        if not node.ready:
            state = element("b", "not ready", class_="tag bad")
        failing = [check for check in node.checks if not check.ok]
        grave = "" if any(check.required for check in failing) else "slight"
        live = element(
            "p",
            element("span", "Not live: reload for news,", id="link", role="status", data_own=True),
            " as of ",
            element("time", clock(self.now), id="at"),
            id="live",
        )
        return element(
            "header",
            element("a", "Skip to the GPUs", href="#gpus", class_="skip"),
            element("div", element("h1", node.name, " ", state), live, class_="top"),
            element("dl", *self._facts(node), class_="facts"),
            element("div", checks_list(failing, CHECKS_ROOM), class_=f"why {grave}")
            if failing
            else "",
            element("nav", *self._links(), aria_label="Parts of the page"),
        )

    def _facts(self, node: NodeStatus) -> Iterator[Html]:
        up = f", up {age(node.started_at, self.now)}" if node.started_at else ""
        yield _fact("Agent", f"{node.version}{up}{', observes only' if node.observe else ''}")
        yield _fact("Kubelet", node.kubelet or "registered, takes the lists")
        yield _fact("API server", self._api())
        yield _fact("Node lock", self._lock())
        yield _fact("Driver", node.driver or "not known")
        factors = f"{counted(node.split_count or 0, 'slice')} of {node.resource} per GPU"
        for name, factor in (("memory", node.memory_scaling), ("cores", node.core_scaling)):
            factors += f", {name} x{factor:g}" if factor not in {None, 1} else ""
        profiles = f", profile {', '.join(node.profiles)}" if node.profiles else ""
        yield _fact("Sharing", f"{factors}{profiles}")

    def _api(self) -> str:
        checks = {check.name: check for check in self.status.node.checks}
        for name in ("api_synced", "api"):
            if name in checks and not checks[name].ok:
                return checks[name].text
        return "watched" if "api" in checks else "not needed"

    def _lock(self) -> Html | str:
        lock = self.status.node.lock
        if lock is None:
            return "free"
        if lock.since is None:
            return f"not readable: {lock.holder}"
        holder = lock.holder or "a pod that it does not name"
        return join((f"held by {holder} for ", lasting(lock.since, self.now)))

    def _links(self) -> Iterator[str]:
        status = self.status
        parts = (
            ("GPUs", len(status.gpus)),
            ("Allocations", len(status.allocations or ())),
            ("Refusals", len(status.refusals or ())),
            ("Changes", len(status.changes or ())),
            ("Checks", len(status.node.checks)),
            ("Settings", len(self.settings)),
        )
        for name, count in parts:
            yield element("a", f"{name} ", element("b", str(count)), href=f"#{name.lower()}")
            yield " "

    def _gpus(self) -> Html:
        status = self.status
        shares = shares_by_gpu(status.gpus, status.allocations or ())
        blocks = listed(
            status.gpus,
            lambda gpu: gpu_block(gpu, shares[gpu.uuid], self.now),
            GPU_ROOM,
            "api/v1/gpus",
            lambda rows: element("div", rows, class_="gpus"),
        )
        none = element("p", "There are no GPUs to share.", class_="none")
        heading = element("h2", "GPUs", id="h-gpus")
        return _section("gpus", heading, blocks if status.gpus else none)

    def _allocations(self, room: int) -> Html:
        allocations = self.status.allocations or ()
        heading = element("h2", "Allocations", id="h-allocations")
        if not allocations:
            none = element("p", "No container holds a share.", class_="none")
            return _section("allocations", heading, none)
        field = element(
            "p",
            element("label", "Filter by pod, container or GPU", for_="filter"),
            " ",
            element("input", id="filter", type="search", autocomplete="off", data_own=True),
            " ",
            element("span", id="shown", role="status", data_own=True),
            id="filtering",
            hidden=True,
        )
        fixed = size(_section("allocations", heading, field))
        table = allocations_table(allocations, self.now, room - fixed)
        return _section("allocations", heading, field, table)

    def _entries(self, name: str, title: str, room: int) -> Html:
        status = self.status
        entries = (status.refusals if name == "refusals" else status.changes) or ()
        since = status.journal_since
        none = f"None since {clock(since)}." if since else "None."
        if since is None or self.now - since > dt.timedelta(hours=24):
            none = "None."
        found = entries_list(entries, self.now, room, f"api/v1/{name}", none)
        return _section(name, element("h2", title, id=f"h-{name}"), found)

    def _checks(self) -> Html:
        heading = element("h2", "Readiness checks", id="h-checks")
        return _section("checks", heading, checks_list(self.status.node.checks, CHECKS_ROOM))

    def _settings(self) -> Html:
        return _section(
            "settings",
            element("h2", "Settings in force", id="h-settings"),
            element(
                "details",
                element("summary", f"{counted(len(self.settings), 'setting')}, each with origin"),
                settings_table(self.settings, SETTINGS_ROOM),
            ),
        )

    def _footer(self) -> Html:
        return element(
            "footer",
            "The same as JSON: ",
            element("a", "api/v1/status", href="api/v1/status"),
            ". For Prometheus: ",
            element("a", "metrics", href="metrics"),
            ". RUNBOOK.md explains the ids of health and refusals.",
        )


def _fact(name: str, value: str) -> Html:
    return element("div", element("dt", name), element("dd", value))


def _section(name: str, *children: str) -> Html:
    return element("section", *children, id=name, aria_labelledby=f"h-{name}")
