"""The life of an attacker's program: it works in steps within its bounds and says what it did."""

import contextlib
import encodings.idna  # noqa: F401 -- names of hosts need it, and later no module can be read
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NOBODY = 65534
NICE = 19
"""An attacker that merely uses up this machine's cores would be no attack on the agent."""


class Bounds:
    """`most` tries within `seconds`, and no more than `rate` a second; stopped by SIGTERM."""

    def __init__(self, most: int, seconds: float, rate: float) -> None:
        self._most, self._end, self._rate = most, time.monotonic() + seconds, rate  # noqa: TID251 -- its own process
        self._begun = time.monotonic()  # noqa: TID251 -- its own process
        self._is_stopped = False
        # No threading.Event: a handler that sets one while it is being waited for never returns.
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self._is_stopped = True

    def is_over(self, tries: int) -> bool:
        """Whether that was all; waits where the tries came faster than they may."""
        now = time.monotonic()  # noqa: TID251 -- its own process
        early = self._begun + tries / self._rate - now
        if early > 0:
            time.sleep(early)  # noqa: TID251 -- its own process
        return self._is_stopped or tries >= self._most or now > self._end


def attack(program: Mapping[str, Any], facts: dict[str, int], arguments: Sequence[str]) -> None:
    """`UID ATTACK MOST SECONDS RATE …`: as that user, make the attack of that name."""
    uid, name, most, seconds, rate = arguments[:5]
    bounds = Bounds(int(most), float(seconds), float(rate))
    os.setgroups([])
    os.setresgid(*3 * [int(uid)])
    os.setresuid(*3 * [int(uid)])
    work(program[name](), bounds, facts)


def work(steps: Iterator[int], bounds: Bounds, facts: dict[str, int]) -> None:
    """Take the steps, each of which says how many tries it was; `facts` is told at the end."""
    os.nice(NICE)
    tries = 0
    say({"at": "work"})
    with contextlib.suppress(StopIteration):
        while not bounds.is_over(tries):
            tries += next(steps)
    say({"tries": tries} | facts)


def say(what: dict[str, Any]) -> None:
    """One line to the test."""
    os.write(1, json.dumps(what).encode() + b"\n")
