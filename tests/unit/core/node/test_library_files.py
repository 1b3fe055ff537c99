"""HAMi-core's files: who may open them, and whether containers load the library."""

import msgspec
import pytest

from agent.ledger import HookFacts
from agent.node.devices import LibraryFile, judge_library_files
from agent.node.findings import consequence

LIBRARY = LibraryFile("/h/vgpu/libvgpu.so", mode=0o644, digest="ab12")
PRELOAD = LibraryFile("/h/vgpu/ld.so.preload", mode=0o644)
GOOD = HookFacts("/h/vgpu/libvgpu.so", preload="/h/vgpu/libvgpu.so\n", hook_path="/h")


def judged(
    library: LibraryFile = LIBRARY, preload: LibraryFile = PRELOAD, facts: HookFacts = GOOD
) -> list[tuple[str, str]]:
    found = judge_library_files(library, preload, facts)
    return [(one.subject.rpartition("/")[2], one.verdict.value) for one in found]


def test_both_in_order_are_one_line_with_the_digest():
    (found,) = judge_library_files(LIBRARY, PRELOAD, GOOD)

    assert "ok" == found.verdict.value
    assert "ab12" in found.said


@pytest.mark.parametrize(
    "change", [{"mode": 0o664}, {"mode": 0o646}, {"mode": 0o640}, {"mode": 0o600}, {"ours": False}]
)
def test_a_file_that_others_may_write_or_not_read_is_wrong(change):
    changed = [msgspec.structs.replace(one, **change) for one in (LIBRARY, PRELOAD)]

    assert [("libvgpu.so", "WRONG")] == judged(library=changed[0])
    assert [("ld.so.preload", "WRONG")] == judged(preload=changed[1])


@pytest.mark.parametrize("text", ["", "/opt/x.so\n", "/h/vgpu/libvgpu.so\r\n", "# nothing\n"])
def test_a_preload_file_that_does_not_name_the_library_is_wrong(text):
    """The line says what to write, and that nothing is on offer: the offer is judged alike."""
    facts = msgspec.structs.replace(GOOD, preload=text)
    (found,) = judge_library_files(LIBRARY, PRELOAD, facts)

    assert ("/h/vgpu/ld.so.preload", "WRONG") == (found.subject, found.verdict.value)
    assert "make /h/vgpu/libvgpu.so its only line" in found.advice
    assert "no new pod gets a GPU of this node" in consequence(found)


def test_another_library_beside_it_is_not_wrong():
    facts = msgspec.structs.replace(GOOD, preload="/opt/x.so\n/h/vgpu/libvgpu.so\n")

    assert [("libvgpu.so", "ok")] == judged(facts=facts)


def test_a_library_that_no_loader_takes_is_wrong():
    assert [("libvgpu.so", "WRONG")] == judged(facts=msgspec.structs.replace(GOOD, loadable=False))


def test_what_cannot_be_read_is_not_known():
    unread = LibraryFile("/h/vgpu/libvgpu.so", failure="cannot be read: denied")
    closed = LibraryFile("/h/vgpu/ld.so.preload", failure="cannot be read: denied")
    unseen = msgspec.structs.replace(GOOD, preload=None)

    assert [("libvgpu.so", "unknown")] == judged(library=unread)
    both = judged(unread, closed, unseen)
    assert [("libvgpu.so", "unknown"), ("ld.so.preload", "unknown")] == both
