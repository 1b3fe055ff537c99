"""What the scenario says of numbers is English for one thing as for several."""

from types import SimpleNamespace

import pytest

from agent.sandbox.scenario import default


class WordJournal:
    """Counts one more of each request whenever it is asked."""

    def __init__(self):
        self.asked = dict.fromkeys(("writes", "reads", "watches"), 0)

    def _count(self, name, step):
        self.asked[name] += step
        return self.asked[name]

    def writes(self, user):
        return self._count("writes", 2)

    def reads(self, user):
        return self._count("reads", 1)

    def watches(self, user):
        return self._count("watches", 1)


@pytest.fixture
def stage(monkeypatch):
    async def is_quiet(stage):
        return True

    monkeypatch.setattr(default, "_is_quiet", is_quiet)
    settled = []
    return SimpleNamespace(
        cluster=SimpleNamespace(
            api=SimpleNamespace(journal=WordJournal(), open_watches=2), user="agent"
        ),
        record=SimpleNamespace(note=lambda text: None),
        settle=lambda claim, found, problems: settled.append(found),
        settled=settled,
    )


async def test_one_request_is_told_in_the_singular(stage):
    await default.idle(stage)

    assert ["2 writes, 1 read, 1 new watch beside 2"] == stage.settled
