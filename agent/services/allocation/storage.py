"""Where an answer becomes durable."""

import dataclasses
from collections.abc import Awaitable, Callable

from agent.core.ports import HookDirs
from agent.core.state.ledger import Ledger


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """The ledger's commit, and the host directories."""

    commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]]
    hooks: HookDirs
