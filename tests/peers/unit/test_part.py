"""A part is signalled by its own number only: never by one that it had, and never the tests."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.peers.lab.part import Part
from tests.peers.lab.space import NodeSpace, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.looptime(False),
    pytest.mark.timeout(30),
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc of Linux"),
]
FOREVER = "sleep 3600 & wait $!"
CHILDLESS = "until [ -e go ]; do :; done"


class Shell(NodeSpace):
    """In the place of a node's space: whatever is started, a shell runs `script` instead."""

    def __init__(self, root: Path, script: str) -> None:
        super().__init__(root)
        self.script = script

    def command(self, arguments: object) -> tuple[str, ...]:
        return ("sh", "-c", f"cd {self.root}; {self.script}")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path, FOREVER)


@pytest.fixture
async def part(shell: Shell):
    made = Part("part", ("unused",), shell.root, space=shell)
    yield made
    (shell.root / "go").touch()
    await made.kill()


async def start_in_vain(part: Part) -> None:
    """Start what never gets a child, and give up once it is there."""
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(part.start())
        await until(lambda: part.is_alive, 10.0, lambda: "it is not started")
        starting.cancel()


async def until_exists(path: Path) -> None:
    await until(path.exists, 10.0, lambda: f"no {path}")


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits for its parent's attention only."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return text.rpartition(") ")[2].startswith("Z")


@pytest.mark.parametrize("end", [Part.kill, Part.stop])
async def test_what_was_never_seen_is_ended_and_the_tests_are_not(part, shell, end: Callable):
    shell.script = f"{CHILDLESS}; sleep 3600 & echo $! >child.new; mv child.new child; wait"
    await start_in_vain(part)
    assert 0 == part.pid
    (shell.root / "go").touch()
    await until_exists(shell.root / "child")
    child = int((shell.root / "child").read_text())

    await end(part)

    assert not part.is_alive
    await until(lambda: has_ended(child), 10.0, lambda: f"{child} lives on")


async def test_a_second_start_does_not_aim_at_the_first_ones_number(part, shell):
    await part.start()
    first = part.pid
    assert first > 0
    await part.kill()
    shell.script = CHILDLESS

    await start_in_vain(part)

    assert 0 == part.pid
    assert part.is_alive


async def test_what_was_said_before_the_last_start_is_told_apart(part, shell):
    for word in ("first", "second"):
        shell.script = f"echo {word}; {FOREVER}"
        await part.start()
        await until(lambda: bool(part.said_since_start()), 10.0, part.tail)
        assert f"{word}\n" == part.said_since_start()
        await part.kill()
    assert part.said().startswith("first\n")
