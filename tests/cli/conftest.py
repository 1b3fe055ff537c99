"""What holds for every verb."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog

from tests.fakes.explain_rig import ExplainRig, explain_rig


@pytest.fixture(autouse=True)
def _log_of_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loggers keep the stream of who configured them first: here it ends with the test."""
    for verb in ("doctor", "explain", "status", "node"):
        monkeypatch.setattr(f"agent.cli.{verb}.configure", lambda *_: None)
    with structlog.testing.capture_logs():
        yield


@pytest_asyncio.fixture
async def rig(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[ExplainRig]:
    """A cluster of models, and the verbs that read it."""
    async with explain_rig(tmp_path, capsys) as made:
        yield made
