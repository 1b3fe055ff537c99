"""How long ago something was, by a clock that can be set."""

import datetime as dt


def has_passed(span: dt.timedelta, since: dt.datetime, now: dt.datetime) -> bool:
    """Whether `since` is at least `span` ago, or in the future.

    A moment of the future is from before the clock was set back: nobody knows how old it is, and
    whoever waited for it would wait for as long as the clock was set back by.
    """
    return not dt.timedelta(0) <= now - since < span
