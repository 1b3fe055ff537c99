"""Decides which containers are limited and held back while others use the same GPUs.

It is the feedback loop of HAMi's vGPUmonitor with the same results for equal inputs. Source: HAMi
v2.10 cmd/vGPUmonitor/feedback.go, CheckBlocking, CheckPriority and Observe. It differs in what it
takes for activity, and in whom it believes:

- HAMi only counts recent_kernel. From HAMi-core 2.8.1 on, a container that is not limited never
  sets it, so two containers that start one after the other are never limited. Here the time of the
  last kernel and the use of SMs count too. CUDA graphs and long kernels show only in the latter.
- A new process also sets the time of the last kernel, for example nvidia-smi in a probe. So that
  time limits others to their shares, but does not hold them back.
- GPUs and priority come from the row. A region can only give up some of its priority.
"""

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from agent.core.inventory.gpu import GpuUuid
from agent.core.state.ledger import Row
from agent.core.usage.region import Region, RegionChange, RegionSums

ACTIVE_FOR: Final = dt.timedelta(seconds=10)
"""For how long a container counts as active after its last kernel, or its last use of an SM."""

HIGHEST_RECENT: Final = 5
"""The highest recent_kernel that is counted down. HAMi-core sets 2; any process can set more."""

HELD: Final = -1
"""The recent_kernel with which HAMi-core holds launches back."""


class RegionUser(msgspec.Struct, frozen=True):
    """A container with a readable region.

    - `gpus`, `priority`: those that count; a smaller number goes first, below 0: apart from others.
    - `is_limiting`, `recent_kernel`: as the region has them.
    - `is_active`: there was a kernel or a new process, or an SM was used, within ACTIVE_FOR.
    - `is_working`: an SM was used within ACTIVE_FOR.
    """

    gpus: frozenset[GpuUuid]
    priority: int
    is_limiting: bool
    recent_kernel: int
    is_active: bool = False
    is_working: bool = False

    @property
    def counted_down(self) -> int:
        """The recent_kernel after this round, unless launches are held or released."""
        recent = min(self.recent_kernel, HIGHEST_RECENT)
        return recent - 1 if recent > 0 else recent


class Feedback(msgspec.Struct, frozen=True):
    """What one round decided, by directory: who is held back, who is limited, what to write."""

    held: frozenset[str] = frozenset()
    limited: frozenset[str] = frozenset()
    changes: Mapping[str, RegionChange] = msgspec.field(default_factory=dict)

    @property
    def release(self) -> Mapping[str, RegionChange]:
        """What to write so that nobody is held back or limited any more."""
        return {
            name: RegionChange(
                is_limiting=False if name in self.limited else None,
                recent_kernel=0 if name in self.held else None,
            )
            for name in self.held | self.limited
        }


def uses_sm(sums: RegionSums, now: dt.datetime) -> bool:
    """Whether a live process of the container uses an SM.

    The number of a dead process stays until another process starts or looks. So where it is not
    known who lives, a kernel must have run lately too.
    """
    if sums.region is None or not any(sums.sm_percent):
        return False
    return sums.knows_living or _is_recent(sums.region.last_kernel, now)


def region_user(
    row: Row, region: Region, now: dt.datetime, last_work: dt.datetime | None
) -> RegionUser:
    """Describe the container of `row`. `last_work`: when it last used an SM; None: not known."""
    is_working = _is_recent(last_work, now)
    return RegionUser(
        gpus=frozenset(row.gpus),
        priority=max(region.priority, row.priority),
        is_limiting=region.is_limiting,
        recent_kernel=region.recent_kernel,
        is_active=is_working or _is_recent(region.last_kernel, now),
        is_working=is_working,
    )


def feedback(users: Mapping[str, RegionUser]) -> Feedback:
    """One round over all containers with a readable region, by directory.

    - A container is held back while one of a smaller priority works on one of its GPUs.
    - It is limited while it is held back, or while more than one of its own priority is active on
      one of its GPUs.
    """
    active, working = _activity(users.values())
    held, limited = set[str](), set[str]()
    changes = dict[str, RegionChange]()
    for name, user in users.items():
        if any(working.get(gpu, user.priority) < user.priority for gpu in user.gpus):
            held.add(name)
        if name in held or any(active[gpu, user.priority] > 1 for gpu in user.gpus):
            limited.add(name)
        change = _change(user, is_held=name in held, is_limited=name in limited)
        if change is not None:
            changes[name] = change
    return Feedback(frozenset(held), frozenset(limited), changes)


def _activity(
    users: Iterable[RegionUser],
) -> tuple[Counter[tuple[GpuUuid, int]], Mapping[GpuUuid, int]]:
    """How many are active by GPU and priority, and the smallest priority that works on each GPU."""
    active = Counter[tuple[GpuUuid, int]]()
    working: dict[GpuUuid, int] = {}
    for user in users:
        launches = user.counted_down > 0
        for gpu in user.gpus if user.priority >= 0 else ():
            if launches or user.is_active:
                active[gpu, user.priority] += 1
            if launches or user.is_working:
                working[gpu] = min(user.priority, working.get(gpu, user.priority))
    return active, working


def _change(user: RegionUser, *, is_held: bool, is_limited: bool) -> RegionChange | None:
    """What to write into the region; None if it is as it should be."""
    recent = min(user.recent_kernel, HELD) if is_held else max(user.counted_down, 0)
    if recent == user.recent_kernel and is_limited == user.is_limiting:
        return None
    return RegionChange(
        is_limiting=is_limited if is_limited != user.is_limiting else None,
        recent_kernel=recent if recent != user.recent_kernel else None,
    )


def _is_recent(moment: dt.datetime | None, now: dt.datetime) -> bool:
    """Whether it was within ACTIVE_FOR. A time that far ahead says nothing: a clock was set."""
    return moment is not None and abs(now - moment) <= ACTIVE_FOR
