"""HAMi-core's files: who may write them, and what ld.so.preload names."""

import msgspec
import pytest

from agent.core.node.library_files import PRELOADED, LibraryFile, judge_library_files, named

LIBRARY = LibraryFile("/h/libvgpu.so", mode=0o644, digest="ab12")
PRELOAD = LibraryFile("/h/ld.so.preload", mode=0o644, text=f"{PRELOADED}\n")


def judged(library: LibraryFile, preload: LibraryFile) -> list[tuple[str, str]]:
    return [(one.subject, one.verdict.value) for one in judge_library_files(library, preload)]


def test_both_in_order_are_one_line_with_the_digest():
    (found,) = judge_library_files(LIBRARY, PRELOAD)

    assert "ok" == found.verdict.value
    assert "ab12" in found.said


@pytest.mark.parametrize("change", [{"mode": 0o664}, {"mode": 0o646}, {"ours": False}])
def test_a_file_that_others_may_write_is_wrong(change):
    changed = [msgspec.structs.replace(one, **change) for one in (LIBRARY, PRELOAD)]

    assert [("/h/libvgpu.so", "WRONG")] == judged(changed[0], PRELOAD)
    assert [("/h/ld.so.preload", "WRONG")] == judged(LIBRARY, changed[1])


@pytest.mark.parametrize("text", ["", "/opt/x.so\n", f"{PRELOADED} /opt/x.so\n", "# nothing\n"])
def test_another_library_in_the_preload_file_is_wrong(text):
    other = msgspec.structs.replace(PRELOAD, text=text)

    assert [("/h/ld.so.preload", "WRONG")] == judged(LIBRARY, other)


def test_the_preload_file_is_read_as_the_loader_does():
    assert ("/a", "/b", "/c") == named("/a:/b # /d\n/c\n")


def test_what_cannot_be_read_is_not_known():
    unread = LibraryFile("/h/libvgpu.so", failure="cannot be read: denied")
    closed = LibraryFile("/h/ld.so.preload", failure="cannot be read: denied")

    assert [("/h/libvgpu.so", "unknown")] == judged(unread, PRELOAD)
    assert [("/h/libvgpu.so", "unknown"), ("/h/ld.so.preload", "unknown")] == judged(unread, closed)
