"""The random histories compare every answer with the truth.

Right: an answer with another container's share is a breach or is counted by its kind, and none is
passed over. The argument is another seed.
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

answered = Audit.answered
seen = Counter[str]()


def judge(self, response):
    known = len(self.breaches) + self.excuses.total()
    answered(self, response)
    seen["answers"] += 1
    if self._asking != owner_in(response):
        seen["another container's"] += 1
        seen["passed over"] += known == len(self.breaches) + self.excuses.total()


Audit.answered = judge  # type: ignore[method-assign]
quiet()
with silence():
    for seed in SEEDS:
        with contextlib.suppress(AssertionError):  # a breach
            play_chunk(Histories, seed, HISTORIES)
print(dict(seen))
verdict(
    right=seen["answers"] > 50 and not seen["passed over"],
    wrong="the histories count answers with another one's share as right",
)
