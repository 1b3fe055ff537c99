"""The storage that an answer needs."""

import dataclasses
from collections.abc import Awaitable, Callable

from agent.core.ports import HookDirs
from agent.core.state.ledger import Ledger


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """Commits changes of the ledger (raises StateError) and makes host directories."""

    commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]]
    hooks: HookDirs
