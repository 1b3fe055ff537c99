"""A process that launches kernels under HAMi-core's rate limiter, on a region in memory."""

import dataclasses
import datetime as dt

import msgspec

from agent.hami.region import Region
from agent.sandbox.hami_core import HamiCoreLibrary


@dataclasses.dataclass
class LimitedProcess:
    """The process. `switch`: the utilisation switch that it found at its start."""

    library: HamiCoreLibrary
    core_limit: int
    policy: str
    switch: bool

    def is_limited(self, region: Region) -> bool:
        """Whether a launch takes tokens."""
        return self.library.is_limited(
            self.core_limit, self.policy, at_start=self.switch, now=region.is_limiting
        )

    def launch(self, region: Region, at: dt.datetime) -> Region | None:
        """The region after a launch at that time, or None while launches are held back."""
        recent = self.library.after_launch(region.recent_kernel, is_limited=self.is_limited(region))
        if recent is None:
            return None
        return msgspec.structs.replace(region, recent_kernel=recent, last_kernel=at)
