"""Renders the lists of the page: allocations, refusals, changes, checks and settings."""

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from agent.codec.status_document import (
    AllocationStatus,
    CheckStatus,
    Entry,
    SettingStatus,
    ShareStatus,
)
from agent.web.page.markup import Html, element, join, size, within
from agent.web.page.words import age, ago, gib

POD_LIMIT: Final = 120
TEXT_LIMIT: Final = 300
VALUE_LIMIT: Final = 100
DEFAULT: Final = "default"
"""The origin of a setting that nobody chose."""
MARGIN: Final = 400
"""Bytes that a list needs besides its items."""

T = TypeVar("T")


def listed(
    items: Sequence[T],
    one: Callable[[T], Html],
    room: int,
    path: str,
    frame: Callable[[Html], Html],
) -> Html:
    """As many items as have room, in their frame; where some are missing, a link to all of them."""
    rows, shown = within(map(one, items), room - MARGIN - size(frame(Html())))
    if shown == len(items):
        return frame(rows)
    link = element("a", path, href=path)
    more = element("p", f"The first {shown} of {len(items)}. All of them: ", link, class_="more")
    return join((frame(rows), more))


def allocations_table(allocations: Sequence[AllocationStatus], now: dt.datetime, room: int) -> Html:
    """What each container holds."""
    heads = ("Pod and container", "GPU", "Memory", "Cores", "Idle", "For")

    def frame(rows: Html) -> Html:
        head = element("tr", *(element("th", name, scope="col") for name in heads))
        body = element("tbody", rows, id="rows")
        return element("table", element("thead", head), body, class_="wide")

    return listed(allocations, lambda one: _allocation(one, now), room, "api/v1/allocations", frame)


def _allocation(one: AllocationStatus, now: dt.datetime) -> Html:
    pod = f"{one.namespace}/{one.pod}" if one.pod else "not known yet"
    cells = (
        ", ".join(share.gpu for share in one.shares),
        _amounts([_memory(share) for share in one.shares]),
        _amounts([_cores(share) for share in one.shares]),
        age(one.last_kernel, now) if one.last_kernel else "",
        age(one.since, now) if one.since else "",
    )
    named = element("th", _cut(pod, POD_LIMIT), " ", element("i", one.container), *_doubts(one))
    return element("tr", named, *(element("td", cell) for cell in cells))


def _doubts(one: AllocationStatus) -> Iterator[Html]:
    if one.ended:
        yield element("i", " It has ended.")
        return
    if one.mismatched:
        yield element("strong", " The kubelet booked another GPU (HA-4006).")
    if one.confirmed is False:
        yield element("strong", " The kubelet has not recorded the answer yet.")
    if one.unkept:
        yield element("strong", f" Nothing keeps its limits: {_cut(one.unkept, TEXT_LIMIT)}.")
    if one.unread:
        yield element("strong", f" Its use is not known: {_cut(one.unread, TEXT_LIMIT)}.")


def _memory(share: ShareStatus) -> str:
    """What is used, if that is known, of what may be used."""
    limit = f"{gib(share.memory_mib)} GiB" if share.memory_mib else ""
    used = "" if share.used_mib is None else gib(share.used_mib)
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


def entries_list(
    entries: Sequence[Entry], now: dt.datetime, room: int, path: str, none: str
) -> Html:
    """Refusals or changes, the newest first."""
    if not entries:
        return element("p", none, class_="none")

    def one(entry: Entry) -> Html:
        about = "/".join(part for part in (entry.namespace, entry.pod, entry.container) if part)
        kind = "tag watch" if entry.warning else "tag"
        return element(
            "li",
            ago(entry.at, now),
            " ",
            element("b", entry.reason, class_=kind),
            " ",
            element(
                "span",
                element("b", _cut(about, POD_LIMIT), ": ") if about else "",
                _cut(entry.text, TEXT_LIMIT),
            ),
        )

    return listed(entries, one, room, path, lambda rows: element("ul", rows, class_="entries"))


def checks_list(checks: Sequence[CheckStatus], room: int) -> Html:
    """The readiness checks: a line for each that fails, and one for all that hold."""

    def one(check: CheckStatus) -> Html:
        state, kind = ("not ready", "bad") if check.required else ("degraded", "watch")
        tag = element("b", state, class_=f"tag {kind}")
        text = _cut(check.text, TEXT_LIMIT)
        return element("li", tag, " ", element("span", element("b", check.name), ": ", text))

    failing = sorted((each for each in checks if not each.ok), key=lambda each: not each.required)
    holding = ", ".join(check.name for check in checks if check.ok)
    ok = element("li", element("b", "ok", class_="tag ok"), " ", element("span", holding))
    end = ok if holding else Html()
    return listed(
        failing,
        one,
        room,
        "readyz?verbose",
        lambda rows: element("ul", rows, end, class_="checks"),
    )


def settings_table(settings: Sequence[SettingStatus], room: int) -> Html:
    """The settings in force, each with its origin; those that somebody chose come first."""
    heads = ("Setting", "Value", "From")

    def frame(rows: Html) -> Html:
        head = element("tr", *(element("th", name, scope="col") for name in heads))
        return element("table", element("thead", head), element("tbody", rows), class_="wide")

    def one(setting: SettingStatus) -> Html:
        late = element("strong", " From the next start on.") if setting.pending else ""
        return element(
            "tr",
            element("th", setting.key),
            element("td", _cut(_shown(setting.value), VALUE_LIMIT), late),
            element("td", _cut(setting.origin, VALUE_LIMIT)),
        )

    ordered = sorted(settings, key=lambda setting: setting.origin == DEFAULT)
    return listed(ordered, one, room, "api/v1/settings", frame)


def _shown(value: object) -> str:
    if value is None or value in ("", [], ()):
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
