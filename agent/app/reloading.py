"""Reading the sources again: on a thread, for parsing takes long and a file system may hang."""

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from agent.app.fitting import Fitting
from agent.core.ports import ServiceNotifier
from agent.kit.offload import Offload
from agent.settings.reading import Look
from agent.settings.sources import Sources


@dataclasses.dataclass(eq=False, slots=True)
class Reloading:
    """One look at the sources after the other. `files`: the ones to watch."""

    fitting: Fitting
    look: Callable[[Sources, Offload], Awaitable[Look]]
    files: frozenset[Path]
    offload: Offload
    notifier: ServiceNotifier

    async def read(self, *, asked: bool) -> frozenset[Path]:
        """Look at the sources, have them judged, return the files to watch.

        Refused ones may not have told of all files, so that the ones before are watched as well.
        """
        with self._told() if asked else contextlib.nullcontext():
            found = await self.look(self.fitting.sources, self.offload)
            if found.refusal is not None:
                self.files |= found.asked
                self.fitting.reject(found.refusal, asked=asked)
                return self.files
            self.files = found.asked
            if found.plan is None:
                self.fitting.keep(asked=asked)
            else:
                self.fitting.take(found.plan, asked=asked)
            return self.files

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Tell systemd of a reload that was asked for."""
        self.notifier.reloading()
        try:
            yield
        finally:
            self.notifier.ready()
