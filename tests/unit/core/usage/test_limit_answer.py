"""What an operator is told of granted limits: when they act, and what the scheduler counts."""

import msgspec
import pytest

from agent.core.state.ledger import Decider
from agent.core.usage.limit_answer import LimitAnswer
from agent.core.usage.region import RegionLayout
from tests.builders import a_share
from tests.unit.core.usage.limit_scene import a_limited_row

ROW = a_limited_row()


def answer(mib: int = 3000, cores: int = 30, **fields: object) -> LimitAnswer:
    live = (a_share(memory_mib=mib, core_percent=cores),)
    after = msgspec.structs.replace(ROW, live_limits=live)
    return LimitAnswer(ROW, after, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("told", "words", "unsaid"),
    [
        (answer(500), "memory limit acts on the next allocation", "core limit"),
        (
            answer(500, obstacle="it is a link"),
            "the agent tries every 5 s: it is a link",
            "The core",
        ),
        (answer(cores=9, layout=RegionLayout.V1_2), "processes that start from now", "memory"),
        (answer(cores=9, layout=RegionLayout.V1_1), "on the container's first GPU alone", "memory"),
        (answer(500), "2.4 and 2.10 count the old ones until the scheduler restarts", "obstacle"),
    ],
)
def test_it_is_told_when_a_limit_acts_and_who_counts_it(told, words, unsaid):
    text = " ".join(told.notes)

    assert words in text
    assert unsaid not in text


def test_where_nothing_changed_nothing_more_is_said():
    assert () == answer().notes
    assert not answer().changed


def test_in_plain_mode_there_is_no_scheduler():
    row = msgspec.structs.replace(ROW, decided_by=Decider.KUBELET)
    after = msgspec.structs.replace(row, live_limits=(a_share(memory_mib=1),))

    assert ("The memory limit acts on the next allocation.",) == LimitAnswer(row, after).notes
