"""Compares times of a clock that can be set back."""

import datetime as dt


def has_passed(span: dt.timedelta, since: dt.datetime, now: dt.datetime) -> bool:
    """Whether `since` is at least `span` ago, or in the future.

    A time in the future was taken before the clock was set back, so its age is not known. Waiting
    for it could take as long as the clock was set back by.
    """
    return not dt.timedelta(0) <= now - since < span
