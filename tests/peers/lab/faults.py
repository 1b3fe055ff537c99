"""Harm that tests do on purpose: programs that stand still, containers that die."""

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.peers.lab.cluster import Cluster
from tests.peers.lab.part import Part
from tests.peers.lab.pods import (
    PodLife,
    as_seen,
    forget_told,
    lives,
    until_restarted,
    until_told,
)
from tests.peers.lab.waiting import until, until_answer


@contextlib.contextmanager
def frozen(part: Part) -> Iterator[None]:
    """A program stands still while the block runs."""
    part.freeze()
    try:
        yield
    finally:
        part.thaw()


def processes(container_id: str) -> frozenset[int]:
    """The processes of a container, as this process counts them; `containerd://` may precede."""
    return frozenset(_members(container_id.rpartition("/")[2]))


async def until_at_rest(lives_of_pods: Iterable[Mapping[str, PodLife]]) -> None:
    """Return once each container of telling pods that have told has its shell and a `sleep` alone.

    Until then what told may be there still, or the `sleep` not yet. Raises TimeoutError.
    """
    ids = [one.id for found in lives_of_pods for one in found.values()]

    async def are_at_rest() -> bool:
        return all(["sh", "sleep"] == _programs(one) for one in ids)

    await until_answer(are_at_rest, 20.0, lambda: f"{[*map(_programs, ids)]} run")


def _programs(container_id: str) -> list[str]:
    """The programs of a container's processes, sorted."""
    found = []
    for pid in processes(container_id):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return sorted(found)


def _members(name: str) -> Iterator[int]:
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with contextlib.suppress(OSError):
                if name in (directory / "cgroup").read_text():
                    yield int(directory.name)


async def end_container(container_id: str) -> None:
    """SIGKILL for all processes of a container; returns when they are gone.

    Raises:
        LookupError: it does not run.
        TimeoutError: they live on.
    """
    found = processes(container_id)
    if not found:
        raise LookupError(f"{container_id} does not run")
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await until(lambda: not found & processes(container_id), 5.0, lambda: f"{found} live")


async def kill_container(cluster: Cluster, name: str) -> None:
    """Kill a telling pod's one container; what it told is forgotten. As `end_container`."""
    forget_told(cluster, name)
    await end_container(lives(as_seen(cluster, name))["main"].id)


async def dies(cluster: Cluster, name: str) -> None:
    """The same; returns when it runs again and has told. Raises TimeoutError."""
    await kill_container(cluster, name)
    await until_restarted(cluster, name, within=60.0)
    await until_told(cluster, name)
