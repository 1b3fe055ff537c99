"""Collects all faults of settings, so that one message names them all."""

import contextlib
from collections.abc import Iterator

from agent.core.errors import SettingsError


class Faults:
    """The errors of one reading in their order, each once."""

    def __init__(self) -> None:
        self._errors: dict[str, SettingsError] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep a SettingsError that the block raises, and continue after it."""
        try:
            yield
        except SettingsError as error:
            for text in error.every:
                self._errors.setdefault(text, error)

    @property
    def texts(self) -> tuple[str, ...]:
        """What each error says."""
        return tuple(self._errors)

    def refuse(self) -> None:
        """Raise one SettingsError with all errors, if there are any."""
        if not self._errors:
            return
        first, *more = self._errors
        if not more:
            raise self._errors[first]
        raise SettingsError(f"{first} (and {len(more)} more)", every=tuple(self._errors))
