"""The API client is loaded before the first answer, and nobody waits for one that cannot be."""

import asyncio

import pytest

from agent.app.loading import OPEN_DEADLINE, connected
from agent.core.errors import SettingsError


class FakeSession:
    def __init__(self, seconds: float, error: Exception | None = None) -> None:
        self.seconds = seconds
        self.error = error
        self.is_open = False

    async def open(self) -> None:
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.is_open = True


async def test_answers_begin_when_the_client_is_there():
    session = FakeSession(0.2)

    await connected(session)

    assert session.is_open


@pytest.mark.parametrize("session", [FakeSession(60), FakeSession(0.1, SettingsError("no file"))])
async def test_answers_begin_without_a_client_that_cannot_be_had(session: FakeSession):
    async with asyncio.timeout(OPEN_DEADLINE + 0.1):
        await connected(session)

    assert not session.is_open
