"""The storage that an answer needs."""

from collections.abc import Awaitable, Callable

import msgspec

from agent.core.ports import HookDirs
from agent.core.state.ledger import Ledger


class Storage(msgspec.Struct, frozen=True):
    """Commits changes of the ledger (raises StateError) and makes host directories."""

    commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]]
    hooks: HookDirs
