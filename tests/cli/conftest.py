"""What holds for every verb."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _log_of_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loggers keep the stream of who configured them first: here it ends with the test."""
    for verb in ("doctor", "explain", "status", "node"):
        monkeypatch.setattr(f"agent.cli.{verb}.configure", lambda *_: None)
    with structlog.testing.capture_logs():
        yield
