"""Parses RFC 3339 times as Go's `time.Parse`, with its error texts.

Source: Go's time/format.go (Parse, ParseError) for the layout `2006-01-02T15:04:05Z07:00`.
"""

import datetime as dt
import re
from typing import Final

LAYOUT: Final = "2006-01-02T15:04:05Z07:00"
_FIELDS: Final = (
    ("", "2006", re.compile(r"[0-9]{4}", re.ASCII), ""),
    ("-", "01", re.compile(r"[0-9]{2}", re.ASCII), "month"),
    ("-", "02", re.compile(r"[0-9]{2}", re.ASCII), ""),
    ("T", "15", re.compile(r"[0-9]{1,2}", re.ASCII), "hour"),
    (":", "04", re.compile(r"[0-9]{2}", re.ASCII), "minute"),
    (":", "05", re.compile(r"[0-9]{2}", re.ASCII), "second"),
)
"""Literal before, name in the layout, form, name of a range error; days are checked last."""
_RANGES: Final = {"month": (1, 12), "hour": (0, 23), "minute": (0, 59), "second": (0, 59)}
_FRACTION: Final = re.compile(r"[.,]([0-9]+)", re.ASCII)
_OFFSET: Final = re.compile(r"([+-])([0-9]{2}):([0-9]{2})", re.ASCII)
_HOURS: Final = re.compile(r".([0-9]{2}):..", re.ASCII | re.DOTALL)
_ZONE: Final = "Z07:00"
_PRINTABLE: Final = (0x20, 0x80)
_MOST_HOURS: Final = 24
_MOST_MINUTES: Final = 60


class TimeError(ValueError):
    """The text is not such a time; the message is Go's."""


def parse_time(text: str) -> dt.datetime:
    """Parse an aware time, cut to 1 µs.

    Raises:
        TimeError: Go refuses the text, or the year is 0, which Python does not have.
    """
    rest, numbers = text, list[int]()
    for literal, name, form, span in _FIELDS:
        if not rest.startswith(literal):
            raise _unlike(text, rest, literal)
        rest = rest[len(literal) :]
        found = form.match(rest)
        if found is None:
            raise _unlike(text, rest, name)
        numbers.append(int(found[0]))
        rest = rest[found.end() :]
        if span and not _RANGES[span][0] <= numbers[-1] <= _RANGES[span][1]:
            raise _beyond(text, span)
    fraction = _FRACTION.match(rest)
    if fraction:
        rest = rest[fraction.end() :]
    offset, rest = _read_zone(text, rest)
    if rest:
        raise TimeError(f"parsing time {_quote(text)}: extra text: {_quote(rest)}")
    micros = int((fraction[1] if fraction else "")[:6].ljust(6, "0"))
    year, month, day, hour, minute, second = numbers
    try:
        local = dt.datetime(year, month, day, hour, minute, second, micros, tzinfo=dt.UTC)
        return local - offset
    except (ValueError, OverflowError) as error:
        raise _beyond(text, "day") from error


def _read_zone(text: str, rest: str) -> tuple[dt.timedelta, str]:
    if rest.startswith("Z"):
        return dt.timedelta(), rest[1:]
    looks = _HOURS.match(rest)
    if looks and int(looks[1]) > _MOST_HOURS:  # before sign and minutes are checked
        raise _beyond(text, "time zone offset hour")
    found = _OFFSET.match(rest)
    if found is None:
        raise _unlike(text, rest, _ZONE)
    hours, minutes = int(found[2]), int(found[3])
    if minutes > _MOST_MINUTES:
        raise _beyond(text, "time zone offset minute")
    offset = dt.timedelta(hours=hours, minutes=minutes)
    return (-offset if found[1] == "-" else offset), rest[found.end() :]


def _unlike(text: str, rest: str, element: str) -> TimeError:
    where = f"cannot parse {_quote(rest)} as {_quote(element)}"
    return TimeError(f"parsing time {_quote(text)} as {_quote(LAYOUT)}: {where}")


def _beyond(text: str, span: str) -> TimeError:
    return TimeError(f"parsing time {_quote(text)}: {span} out of range")


def _quote(text: str) -> str:
    """Quote as `time.quote`: bytes for characters that are not printable ASCII."""
    return '"' + "".join(_sign(byte) for byte in text.encode()) + '"'


def _sign(byte: int) -> str:
    if not _PRINTABLE[0] <= byte < _PRINTABLE[1]:
        return f"\\x{byte:02x}"
    return f"\\{chr(byte)}" if chr(byte) in '"\\' else chr(byte)
