"""Wall time is aware and in UTC; names of boot and machine are words or nothing."""

import datetime as dt

from agent.host.clock import SystemClock, boot_id, machine_id


def test_now_is_in_utc():
    assert dt.timedelta(0) == SystemClock().now().utcoffset()


def test_names_are_read_without_the_line_end(tmp_path):
    (tmp_path / "id").write_text("2f7c7a3e\n")

    assert "2f7c7a3e" == boot_id(tmp_path / "id") == machine_id(tmp_path / "id")


def test_a_name_that_cannot_be_read_is_empty(tmp_path):
    assert "" == boot_id(tmp_path / "missing") == machine_id(tmp_path)


def test_this_boot_has_a_name():
    assert 36 == len(boot_id())
