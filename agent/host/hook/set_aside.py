"""Removes container directories that were set aside, in small parts.

It runs on a thread of its own, so making a directory never waits for it.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from agent.core.reconcile.clearing import Cleared
from agent.host.hook.path import (
    LISTED,
    SLICE_ENTRIES,
    SLICE_SECONDS,
    open_containers,
    state_errors,
)
from agent.kit.dissolve import dissolve

ASIDE: Final = re.compile(r"\.removed-[0-9a-f]{1,64}-[0-9a-f]{16}")
"""The name of a directory set aside, with the pod's UID without its hyphens: HAMi's monitors up to
and including 2.6.1 crash on them."""
VISIT: Final = 100_000
"""Steps in one directory before the next one: a process may still write into it."""


class SetAside:
    """Removes the directories set aside below `hook`, and knows which cannot be removed."""

    def __init__(self, hook: Path) -> None:
        self._hook = hook
        self._visit: Iterator[None] | None = None
        self._visiting = ""
        self._visited: set[str] = set()
        self._kept: dict[str, str] = {}

    def clear(self, again: bool, now: Callable[[], float]) -> Cleared:  # noqa: FBT001 -- for an Offload
        """Remove a bounded part; with `again`, also try what could not be removed before.

        Raises StateError.
        """
        end, more = now() + SLICE_SECONDS, True
        with state_errors(self._hook):
            if again:
                self._kept.clear()
            for _ in range(SLICE_ENTRIES):
                more = self._visit is not None or self._choose()
                if not more or now() > end:
                    break
                self._step()
        return Cleared(more=more, kept=len(self._kept), why=next(iter(self._kept.values()), ""))

    def _choose(self) -> bool:
        """Choose the next directory, those not visited in this round first; False: none is left."""
        with contextlib.ExitStack() as open_directories:
            try:
                above = open_containers(self._hook, open_directories)
            except FileNotFoundError:
                self._kept.clear()
                return False
            with os.scandir(above) as entries:
                listed = (entry.name for entry in itertools.islice(entries, LISTED))
                names = set(filter(ASIDE.fullmatch, listed))
        self._kept = {name: why for name, why in self._kept.items() if name in names}
        left = names - self._kept.keys()
        self._visited &= left
        if left == self._visited:
            self._visited.clear()
        if not left:
            return False
        self._visiting = min(left - self._visited)
        self._visited.add(self._visiting)
        self._visit = itertools.islice(self._dissolve(self._visiting), VISIT)
        return True

    def _dissolve(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as open_directories:
            yield from dissolve(name, open_containers(self._hook, open_directories))

    def _step(self) -> None:
        if self._visit is None:
            return
        try:
            next(self._visit)
        except StopIteration:
            self._visit = None
        except OSError as error:
            self._visit = None
            self._kept[self._visiting] = error.strerror or "unknown error"
