"""Wall time is aware and in UTC."""

import datetime as dt

from agent.host.process import SystemClock


def test_now_is_in_utc():
    assert dt.timedelta(0) == SystemClock().now().utcoffset()
