"""Containers on GPUs of a simulated node: kernels of HAMi-core, and rounds of feedback."""

import dataclasses
import datetime as dt
from collections.abc import Iterable

import msgspec

from agent.hami.region import Region, RegionReading, RegionState
from agent.ledger import Row
from agent.model import GpuUuid
from agent.sandbox.hami_core import HamiCoreLibrary
from agent.usage import Feedback, feedback, region_user, uses_sm
from tests.builders import G1, NOON, a_row, a_share
from tests.fakes.limiter import LimitedProcess
from tests.fakes.regions import a_process, a_region, changed

ROUND = dt.timedelta(seconds=5)


@dataclasses.dataclass
class SharingContainer:
    """One container: its row, its region, and its process once it has started one."""

    row: Row
    region: Region
    process: LimitedProcess | None = None
    last_work: dt.datetime | None = None


class SharedGpus:
    """Containers that run a release of HAMi-core, limited to 30 percent of each GPU."""

    def __init__(self, release: HamiCoreLibrary) -> None:
        self.release = release
        self.now = NOON
        self.containers: dict[str, SharingContainer] = {}
        self.last = Feedback()

    def start(self, name: str, priority: int = 1, gpus: Iterable[GpuUuid] = (G1,)) -> None:
        """The first process of a container starts, and makes its region."""
        uuids = tuple(gpus)
        row = msgspec.structs.replace(a_row(shares=map(_share, uuids)), priority=priority)
        region = a_region(*uuids, priority=priority, last_kernel=self.now)
        process = LimitedProcess(self.release, 30, "default", region.is_limiting)
        self.containers[name] = SharingContainer(row, region, process)

    def restart(self, name: str) -> None:
        """The process of a container is followed by another one."""
        one = self.containers[name]
        one.process = LimitedProcess(self.release, 30, "default", one.region.is_limiting)
        one.region = msgspec.structs.replace(one.region, last_kernel=self.now)

    def launch(self, name: str, sm: int = 50) -> bool:
        """A kernel that uses so much of each GPU; whether it was launched."""
        one = self.containers[name]
        assert one.process is not None
        after = one.process.launch(one.region, self.now)
        one.region = msgspec.structs.replace(
            after or msgspec.structs.replace(one.region, last_kernel=self.now),
            processes=(a_process(*[2**30] * len(one.region.gpus), sm=sm if after else 0),),
        )
        return after is not None

    def rest(self, name: str) -> None:
        """No kernel of the container runs."""
        one = self.containers[name]
        processes = (a_process(*[2**30] * len(one.region.gpus)),)
        one.region = msgspec.structs.replace(one.region, processes=processes)

    def round(self, *, alive: bool = True) -> Feedback:
        """Five seconds later, one round; `alive`: the agent knows that the processes live."""
        self.now += ROUND
        users = {}
        for name, one in self.containers.items():
            living = frozenset({1}) if alive else None
            reading = RegionReading(RegionState.READABLE, one.region, alive=living)
            if uses_sm(reading.sums(), self.now):
                one.last_work = self.now
            users[name] = region_user(one.row, one.region, self.now, one.last_work)
        self.last = feedback(users)
        for name, change in self.last.changes.items():
            self.containers[name].region = changed(self.containers[name].region, change)
        return self.last

    def is_limited(self, name: str) -> bool:
        """Whether launches of the container take tokens now."""
        one = self.containers[name]
        assert one.process is not None
        return one.process.is_limited(one.region)


def _share(uuid: GpuUuid):
    return a_share(uuid=uuid)
