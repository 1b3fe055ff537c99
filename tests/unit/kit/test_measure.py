"""What lies below a directory is counted without a change, whatever lies there."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.kit.measure import Measure, MeasureBounds

TIB = 2**40
WIDE = MeasureBounds(size=TIB, entries=1_000_000, depth=16)


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    (tmp_path / "above" / "leaf").mkdir(parents=True)
    return tmp_path / "above" / "leaf"


def measured(
    leaf: Path, bounds: MeasureBounds = WIDE, meanwhile: Callable[[int], None] = lambda _: None
) -> tuple[Measure, int]:
    """What was found, and in how many steps; `meanwhile` is called after each."""
    measure, steps = Measure(bounds), 0
    above = os.open(leaf.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for _ in measure.steps(leaf.name, above):
            steps += 1
            meanwhile(steps)
    finally:
        os.close(above)
    return measure, steps


def allocated(*paths: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in paths)


def handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_allocated_is_counted_with_the_directories_themselves(leaf):
    (leaf / "a.cache").write_bytes(bytes(100_000))
    (leaf / "d").mkdir()
    (leaf / "d" / "b").write_bytes(bytes(5_000))

    found, steps = measured(leaf)

    expected = allocated(leaf, leaf / "a.cache", leaf / "d", leaf / "d" / "b")
    assert (expected, 3, 0, False) == (found.size, found.entries, found.closed, found.is_beyond)
    assert expected >= 105_000
    assert 3 == steps


def test_one_that_is_missing_or_is_none_holds_nothing(leaf, tmp_path):
    (leaf.parent / "file").write_bytes(bytes(9_000))
    (leaf.parent / "link").symlink_to(leaf)
    (leaf / "a").write_bytes(bytes(9_000))

    for name in ("missing", "file", "link"):
        found, steps = measured(leaf.parent / name)
        assert (0, 0, 0, 0) == (found.size, found.entries, found.closed, steps)


def test_a_sparse_file_is_as_large_as_its_blocks(leaf):
    with (leaf / "sparse").open("wb") as file:
        file.truncate(10 * TIB)
        file.write(b"x")

    found, _ = measured(leaf)

    assert 0 < found.size < 1_000_000
    assert not found.is_beyond


def test_links_are_counted_and_not_followed_and_nothing_is_opened_that_could_hang(leaf, tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_bytes(bytes(1_000_000))
    (leaf / "to-directory").symlink_to(tmp_path / "victim")
    (leaf / "to-file").symlink_to(tmp_path / "victim" / "file")
    (leaf / "loop").symlink_to("loop")
    os.mkfifo(leaf / "fifo")

    found, _ = measured(leaf)

    assert 4 == found.entries
    assert found.size < 100_000


def test_a_file_of_several_names_is_one(leaf):
    (leaf / "a").write_bytes(bytes(100_000))
    for number in range(20):
        os.link(leaf / "a", leaf / f"a{number}")

    found, _ = measured(leaf)

    assert (allocated(leaf, leaf / "a"), 21) == (found.size, found.entries)


def test_counting_ends_with_the_first_entry_beyond_the_bound(leaf):
    for number in range(10_050):
        (leaf / f"{number}").touch()

    found, steps = measured(leaf, MeasureBounds(size=TIB, entries=10_000, depth=16))

    assert (10_001, 10_001, True) == (found.entries, steps, found.is_beyond)


def test_entries_of_all_directories_count_together(leaf):
    for number in range(20):
        (leaf / f"{number}").mkdir()
        for one in range(20):
            (leaf / f"{number}" / f"{one}").touch()

    found, _ = measured(leaf, MeasureBounds(size=TIB, entries=50, depth=16))

    assert (51, True) == (found.entries, found.is_beyond)


def test_counting_ends_with_the_bytes_beyond_the_bound(leaf):
    for number in range(10):
        (leaf / f"{number}").write_bytes(bytes(100_000))

    found, steps = measured(leaf, MeasureBounds(size=250_000, entries=1000, depth=16))

    assert found.is_beyond
    assert steps < 10


def test_counting_ends_with_the_depth_and_uses_a_bounded_number_of_descriptors(leaf):
    at = os.open(leaf, os.O_RDONLY)
    for _ in range(100):
        os.mkdir("d", dir_fd=at)
        above, at = at, os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(above)
    os.close(at)
    before, most = handles(), 0

    def count(_: int) -> None:
        nonlocal most
        most = max(most, handles())

    found, _ = measured(leaf, MeasureBounds(size=TIB, entries=1000, depth=16), count)

    assert (True, 16) == (found.is_deep, found.entries)
    assert most - before <= 2 * 16 + 1
    assert before == handles()


def test_a_walk_that_is_given_up_leaves_nothing_open(leaf):
    (leaf / "d" / "e").mkdir(parents=True)
    before = handles()
    above = os.open(leaf.parent, os.O_RDONLY | os.O_DIRECTORY)
    steps = Measure(WIDE).steps(leaf.name, above)
    next(steps)
    next(steps)
    assert handles() > before + 1

    steps.close()  # type: ignore[attr-defined]  # a generator
    os.close(above)

    assert before == handles()


def test_nothing_is_changed(leaf):
    (leaf / "d").mkdir(mode=0o500)
    (leaf / "d").chmod(0o2751)
    (leaf / "file").write_text("mine")
    (leaf / "file").chmod(0o400)
    before = {
        path: (stat.S_IMODE(found.st_mode), found.st_mtime_ns, found.st_ctime_ns)
        for path in (leaf, leaf / "d", leaf / "file")
        for found in [path.lstat()]
    }

    measured(leaf)

    assert before == {
        path: (stat.S_IMODE(found.st_mode), found.st_mtime_ns, found.st_ctime_ns)
        for path in before
        for found in [path.lstat()]
    }


def test_what_goes_or_is_swapped_for_a_link_meanwhile_is_passed_over(leaf, tmp_path):
    (tmp_path / "victim").mkdir()
    for number in range(1_000):
        (tmp_path / "victim" / f"{number}").touch()
    for number in range(20):
        (leaf / f"d{number}").mkdir()

    def swap(step: int) -> None:
        for path in sorted(leaf.iterdir())[:2]:
            if not path.is_symlink():
                path.rmdir()
                if step % 2:
                    path.symlink_to(tmp_path / "victim")

    found, _ = measured(leaf, WIDE, swap)

    assert found.entries < 100
    assert 0 == found.closed


def test_names_of_any_bytes_are_counted(leaf):
    for name in (b"\xff\xfe\n" * 80, b"-rf", b"\x1b[2J"):
        (leaf / os.fsdecode(name)).mkdir()

    found, _ = measured(leaf)

    assert 3 == found.entries


def test_what_the_disk_says_is_raised(leaf):
    with pytest.raises(OSError, match="File name too long"):
        measured(leaf.parent / ("x" * 300))
