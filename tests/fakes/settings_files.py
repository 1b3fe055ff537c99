"""Settings files read here and now: for tests that have no loop of their own."""

import asyncio

from agent.settings import reading
from agent.settings.reading import NodeValues, Sources, SourcesRead
from tests.fakes.offload import Inline


def look(sources: Sources, last: SourcesRead | None = None) -> SourcesRead:
    """One look at the sources; those of `last`, if any, are in force."""
    return asyncio.run(reading.look(sources, Inline(), last, last.sources if last else None))


def load(sources: Sources) -> NodeValues:
    """What they say. Raises SettingsError."""
    return look(sources).taken()


def begin(sources: Sources) -> SourcesRead:
    """What to start with. Raises SettingsError."""
    return asyncio.run(reading.begin(sources, Inline(), Inline()))
