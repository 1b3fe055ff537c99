"""Reads the wall clock."""

import datetime as dt


class SystemClock:
    """The Clock port over the system clock."""

    def now(self) -> dt.datetime:
        """The current time, aware, in UTC."""
        return dt.datetime.now(dt.UTC)
