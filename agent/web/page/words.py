"""Times and sizes in words for the page."""

import datetime as dt
from typing import Final

from agent.web.page.markup import Html, element

_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def age(since: dt.datetime, now: dt.datetime) -> str:
    """How long ago, in one or two units, as `4 min` or `3 d 4 h`; a future time is `0 s`."""
    left = max(0, int((now - since).total_seconds()))
    for place, (length, name) in enumerate(_UNITS):
        if left >= length:
            whole, rest = divmod(left, length)
            following = _UNITS[place + 1 : place + 2] if whole < 10 and length > 60 else ()
            ends = [f" {rest // small} {unit}" for small, unit in following if rest // small]
            return f"{whole} {name}{''.join(ends)}"
    return "0 s"


def ago(since: dt.datetime, now: dt.datetime) -> Html:
    """`4 min ago`, with the time itself for programs and as a tooltip."""
    return _time(f"{age(since, now)} ago", since)


def lasting(since: dt.datetime, now: dt.datetime) -> Html:
    """`4 min`, with the beginning for programs and as a tooltip."""
    return _time(age(since, now), since)


def _time(words: str, at: dt.datetime) -> Html:
    utc = at.astimezone(dt.UTC)
    return element(
        "time",
        words,
        datetime=utc.strftime("%Y-%m-%dT%H:%M:%SZ"),
        title=utc.strftime("%Y-%m-%d %H:%M:%S UTC"),
    )


def clock(at: dt.datetime) -> str:
    """The time of day, in UTC."""
    return at.astimezone(dt.UTC).strftime("%H:%M:%S UTC")


def gib(mib: int) -> str:
    """Memory in GiB, such as `8.0`."""
    return f"{mib / 1024:.1f}"


def counted(count: int, noun: str) -> str:
    """`1 slice`, `3 slices`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
