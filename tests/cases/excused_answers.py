"""The random histories compare every answer with the truth, but for what their judge excuses.

Right: no answer that it excuses gave a container another one's share. The argument is another seed.
"""

import contextlib
import sys
from collections import Counter

from tests.cases.box import quiet, verdict
from tests.machine.audit import Audit, owner_in
from tests.machine.histories import Histories
from tests.machine.playing import play_chunk, silence

FIRST = int(sys.argv[1]) if sys.argv[1:] else 910001
SEEDS = range(FIRST, FIRST + 8)
HISTORIES = 25
"""Of each seed."""

answered, is_mistaken = Audit.answered, Audit._is_mistaken
answers, excused = Counter[str](), Counter[str]()


def count(self, response):
    answers["compared or excused"] += 1
    answered(self, response)


def look(self, response):
    is_excused, asked, given = is_mistaken(self, response), self._asking, owner_in(response)
    if is_excused and asked != given:
        excused["another container's" if asked[0] == given[0] else "another pod's"] += 1
    return is_excused


Audit.answered, Audit._is_mistaken = count, look  # type: ignore[method-assign]
quiet()
with silence():
    for seed in SEEDS:
        with contextlib.suppress(AssertionError):  # a breach that the judge does find
            play_chunk(Histories, seed, HISTORIES)
print(dict(answers), "excused with another one's share:", dict(excused))
verdict(right=not excused, wrong="the histories count answers with another one's share as right")
