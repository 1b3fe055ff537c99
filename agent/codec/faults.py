"""What is wrong with settings, collected so that whoever mends them hears of all of it at once."""

import contextlib
from collections.abc import Iterator

from agent.core.errors import SettingsError


class Faults:
    """The refusals of one reading, in their order, each once."""

    def __init__(self) -> None:
        self._found: dict[str, SettingsError] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what the block refuses, and go on behind it."""
        try:
            yield
        except SettingsError as error:
            for text in error.every:
                self._found.setdefault(text, error)

    def refuse(self) -> None:
        """Nothing, where nothing was refused. Raises SettingsError with all that was."""
        if not self._found:
            return
        first, *more = self._found
        if not more:
            raise self._found[first]
        raise SettingsError(f"{first} (and {len(more)} more)", every=tuple(self._found))
