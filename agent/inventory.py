"""Keeps the inventory: discovery, the list of slices, withholding, samples."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NoReturn

import msgspec
import structlog
from msgspec.structs import replace

from agent.allocate.edits import looks_up_cdi, undefined
from agent.allocate.room import GpuUse
from agent.allocate.service import DISK_BUDGET, AllocateStep, refusal_of
from agent.cluster import NodeEvent
from agent.errors import AgentError, DriverError, GpuError, StateError
from agent.health.judge import MANY, MAY_PASS, OF_ALL, Ill, same_fault
from agent.kit.cell import Cell, News
from agent.kit.timing import Lag, await_event, loop_time, until_tick
from agent.ledger import EditSettings, Ledger
from agent.model import (
    MIG_MODE,
    NO_INDEX,
    Cause,
    Condition,
    Gpu,
    GpuFault,
    GpuSample,
    GpuUuid,
    Health,
    Held,
    Inventory,
    Scan,
    SharedGpu,
    SharingSettings,
    SliceGroup,
    SliceList,
    attributed,
    listed_ids,
    registered_core_percent,
    registered_mib,
    type_name,
)
from agent.ports import Clock, Driver

log = structlog.get_logger(__name__)

# Scans for GPUs: at the start, when the driver reports a change, each minute, and on demand.

SCAN_PERIOD: Final = 60.0
SCAN_DEADLINE: Final = 10.0
FIRST_RETRY: Final = 1.0
LAST_RETRY: Final = 30.0


class Discovery:
    """Scans the driver and passes each scan to `found`.

    A scan is tried again after 1, 2, 4, … 30 s if the driver is missing or fails, or reports the
    same fault for all GPUs that are not `ill`, also in a new session: then the last inventory
    stays; and if it fails for one GPU in a way that may pass. `problem`: what is wrong with the
    driver, in words; None: it answers.
    """

    def __init__(self, driver: Driver, found: Callable[[Scan], None], *, ill: Ill) -> None:
        self.problem: Cell[str | None] = Cell("the driver has not been asked yet")
        self._driver = driver
        self._found = found
        self._ill = ill
        self._wanted = asyncio.Event()

    def rescan(self) -> None:
        """Scan as soon as possible. Calls during a scan cause one more scan."""
        self._wanted.set()

    async def run(self) -> None:
        """Scan for ever."""
        delay = FIRST_RETRY
        while True:
            self._wanted.clear()
            is_done = await self._scan()
            pause = until_tick(SCAN_PERIOD) if is_done else delay
            is_wanted = await await_event(self._wanted, pause)
            # A rescan on demand gives the driver no time to recover.
            delay = delay if is_wanted else min(2 * delay, LAST_RETRY)
            delay = FIRST_RETRY if is_done else delay

    async def _scan(self) -> bool:
        """Scan once, and again in a new session if all GPUs fail alike. False: try again soon."""
        scan: Scan | None = None
        try:
            async with Lag().within(SCAN_DEADLINE):
                scan = await self._driver.scan()
                if same_fault(scan, self._ill) is not None and await self._driver.renew():
                    scan = await self._driver.scan()
            fault = same_fault(scan, self._ill) if len(scan.faults) >= MANY else None
            problem = OF_ALL + fault.text if fault is not None else None
        except (DriverError, TimeoutError) as error:
            problem = str(error) or f"the driver did not answer within {SCAN_DEADLINE:g} s"

        is_news = self.problem.set(problem)
        if scan is None or problem is not None:
            if is_news:
                log.warning("driver.fails", err=problem)
            return False

        self._found(scan)
        return not any(fault.trouble in MAY_PASS for fault in scan.faults)


SAMPLE_PERIOD: Final = 5.0
DEADLINE: Final = 2.0


class Samples:
    """Asks the GPUs of the inventory for their usage.

    A GPU that is lost, gone or silent is not asked until its probes pass, which report failures.
    """

    def __init__(self, driver: Driver, inventory: Cell[Inventory]) -> None:
        self._driver = driver
        self._inventory = inventory
        self._newest: Mapping[GpuUuid, GpuSample] = {}  # of the GPUs that answered last

    async def run(self) -> NoReturn:
        """Ask all GPUs at each tick of PERIOD, for ever."""
        while True:
            answers: dict[GpuUuid, GpuSample] = {}
            async with asyncio.TaskGroup() as tasks:
                for gpu in self._inventory.value.gpus:
                    # A GPU that is filtered out may still be in use: it is asked, too.
                    health = gpu.health
                    if gpu.there and health.condition is not Condition.LOST and not health.silent:
                        tasks.create_task(self._ask(gpu.uuid, answers))
            self._newest = answers
            await asyncio.sleep(until_tick(SAMPLE_PERIOD))

    async def _ask(self, uuid: GpuUuid, answers: dict[GpuUuid, GpuSample]) -> None:
        with contextlib.suppress(DriverError, GpuError, TimeoutError):
            async with asyncio.timeout(DEADLINE):
                answers[uuid] = await self._driver.sample(uuid)

    def newest(self, uuid: GpuUuid) -> GpuSample | None:
        """The usage of one GPU now; None: it is not asked or does not report it."""
        return self._newest.get(uuid)


# Checks the node for faults for which every new pod would be refused, and withholds all slices.
# Otherwise controllers keep creating pods, and the scheduler keeps sending them here.

CHECK_PERIOD: Final = 10.0  # between two runs of a check while slices are on offer
LEAST: Final = 0.5  # seconds between two runs at least, and while slices are withheld


class NodeCheck(msgspec.Struct, frozen=True):
    """`check` raises the AgentError by which `step` would fail for every new pod.

    `turn`: see agent.kit.timing.
    """

    step: AllocateStep
    check: Callable[[], Awaitable[None]]
    turn: int = 0


class Withholder:
    """Sole writer of `reasons`: why every new pod would be refused, one sentence each.

    While there are any, no slice is on offer: `withhold` is called with them when they change.
    `say` posts an Event about the Node.
    """

    def __init__(
        self,
        checks: Sequence[NodeCheck],
        withhold: Callable[[str], None],
        say: Callable[[NodeEvent], None],
    ) -> None:
        self.reasons: Cell[tuple[str, ...]] = Cell(())
        self._checks = checks
        self._found: dict[NodeCheck, str] = {}
        self._looks = Cell(0)  # how often somebody wanted all checks to run soon
        self._withhold = withhold
        self._say = say
        self._lag = Lag()

    async def run(self) -> None:
        """Run all checks for ever. A check that hangs does not delay the others."""
        async with asyncio.TaskGroup() as group:
            for check in self._checks:
                group.create_task(self._repeat(check))

    def refused(self, sentence: str) -> None:
        """Run all checks soon; where a pod's refusal says that a disk is silent, withhold now."""
        for check in self._checks:
            if sentence == _silence(check):
                self._note(check, sentence)
        self.look()

    def look(self) -> None:
        """Run all checks soon."""
        self._looks.set(self._looks.value + 1)

    async def _repeat(self, check: NodeCheck) -> NoReturn:
        loop, looks = asyncio.get_running_loop(), News(self._looks)
        while True:
            begun, refusal = loop.time(), ""
            try:
                with self._lag.alarm(DISK_BUDGET, lambda _: self._note(check, _silence(check))):
                    await check.check()
            except StateError as error:
                refusal = str(refusal_of(error, check.step))
            except AgentError as error:
                refusal = str(error)
            self._note(check, refusal)
            await looks.wait(LEAST if self.reasons.value else until_tick(CHECK_PERIOD, check.turn))
            await asyncio.sleep(max(0.0, begun + LEAST - loop.time()))

    def _note(self, check: NodeCheck, refusal: str) -> None:
        """Note the refusal that a new pod would get. Empty: the check passed."""
        is_first = check not in self._found
        self._found[check] = refusal
        reasons = tuple(dict.fromkeys(filter(None, map(self._found.get, self._checks))))
        # Nothing is on offer before each check has come back.
        if not reasons and len(self._found) < len(self._checks):
            return

        was_withheld = bool(self.reasons.value)
        if self.reasons.set(reasons) or is_first:
            self._withhold("; ".join(reasons))
        if bool(reasons) == was_withheld:
            return

        if reasons:
            text = f"Every new pod would be refused, so no slice is on offer: {'; '.join(reasons)}"
            log.error("slices.withheld", err=text)
            self._say(NodeEvent("NothingOffered", text, warning=True))
        else:
            self._say(NodeEvent("SlicesOffered", "The node's slices are on offer.", warning=False))

        self.look()  # the others may wait for longer than is right now


def _silence(check: NodeCheck) -> str:
    """The refusal while the check does not end."""
    return str(refusal_of(TimeoutError(), check.step))


def slice_list(inventory: Inventory, held: Held, before: SliceList) -> SliceList:
    """The list for the kubelet; `before` itself if nothing in it changed.

    Each GPU has all ids in use and the lowest free ones up to the split count.
    """
    groups = tuple(
        SliceGroup(
            gpu.uuid,
            listed_ids(gpu.uuid, gpu.split_count, held.get(gpu.uuid, ())),
            inventory.offers(gpu),
            gpu.gpu.numa if gpu.numa_hint else None,
        )
        for gpu in inventory.gpus
    )
    is_same = before.generation > 0 and groups == before.groups
    return before if is_same else SliceList(before.generation + 1, groups)


# Keeps the inventory: combines scans, health, held slices and settings into one value.

# Seconds between two looks at the CDI specifications, which read again what changed, and for one
# look; of directories that hang, nothing is known.
SPECIFICATIONS_PERIOD: Final = 5.0
SPECIFICATIONS_DEADLINE: Final = 2.0

IN_MIG_MODE: Final = "it is in MIG mode, which is not shared yet; disable MIG or use another plugin"
NODE_OF_MIG: Final = "sharing.operatingMode is mig, which is not shared yet; set hami-core or mps"


class InventoryKeeper:
    """Sole writer of the inventory and of `slices`, the list for the kubelet.

    Every method publishes at most once; all but run() at once, the list before the inventory, so
    that the kubelet hears of an unhealthy GPU before anybody else acts on it.

    - `left_out`: the GPUs that are not shared, and why.
    - A GPU that the driver lists but cannot describe keeps its last known facts.
    - A GPU stays, as not present, in three cases: a slice of it is held while it is gone, filtered
      out or no longer shareable; it is remembered as not ok, and the driver lists it without having
      described it since the start; container runtimes do not find it by its CDI name.
    - `names` reads the CDI names that are defined in these directories; None: not known.
    - `withheld`: see withhold(); None: nothing is published before it is called.
    """

    def __init__(
        self,
        inventory: Cell[Inventory],
        settings: Cell[SharingSettings],
        clock: Clock,
        recalled: Mapping[GpuUuid, Health] | None = None,
        edits: Cell[EditSettings] | None = None,
        names: Callable[[Sequence[str]], Awaitable[frozenset[str] | None]] | None = None,
        slices: Cell[SliceList] | None = None,
        withheld: str | None = "",
    ) -> None:
        self.left_out: Cell[tuple[GpuFault, ...]] = Cell(())
        self._inventory = inventory
        self._slices = slices or Cell(SliceList())
        self._settings = settings
        self._edits = edits or Cell(EditSettings())
        self._names = names
        self._defined: frozenset[str] | None = None
        self._is_unread = names is not None
        self._clock = clock
        self._held: Held = {}
        self._health: dict[GpuUuid, Health] = dict(recalled or {})
        self._facts: dict[GpuUuid, Gpu] = {}
        self._scan: Scan | None = None
        self._withheld = withheld

    async def run(self) -> None:
        """Follow the settings, and the CDI specifications while answers name GPUs by them."""
        changes = News(self._settings, self._edits)
        while True:
            edits, defined, period = self._edits.value, None, None
            if self._names is not None and looks_up_cdi(edits):
                period = until_tick(SPECIFICATIONS_PERIOD, turn=1)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SPECIFICATIONS_DEADLINE):
                        defined = await self._names(edits.cdi_spec_dirs)
            self._defined, self._is_unread = defined, False
            self.refresh()
            await changes.wait(period)

    def found(self, scan: Scan) -> None:
        """Take over a scan of the driver."""
        self._scan = scan
        self._facts.update({gpu.uuid: gpu for gpu in scan.gpus})
        self.refresh()

    def judged(self, health: Mapping[GpuUuid, Health]) -> None:
        """Take over the health of these GPUs."""
        self._health.update(health)
        self.refresh()

    def withhold(self, reason: str) -> None:
        """Withhold all slices, or without a reason offer them, whatever the health of the GPUs."""
        self._withheld = reason
        self.refresh()

    def hold(self, held: Held) -> None:
        """Replace the set of slices in use."""
        self._held = held
        self.refresh()

    async def follow_held(self, ledger: Cell[Ledger]) -> None:
        """Keep the slices in use listed, for ever."""
        async for rows in ledger.follow():
            self.hold(rows.held_ids)

    def refresh(self) -> None:
        """Compute inventory and list again, and publish what changed."""
        # Before the first scan or check, a list would take every slice, or offer what is refused.
        is_unread = self._is_unread and looks_up_cdi(self._edits.value)
        if self._scan is None or self._withheld is None or is_unread:
            return

        # GPUs that are remembered as not ok, and not because health checks are switched off.
        unwell = {
            uuid
            for uuid, health in self._health.items()
            if health.condition is not Condition.OK and health.cause != Cause.OFF
        }
        found = {gpu.uuid for gpu in self._scan.gpus} | {one.gpu for one in self._scan.faults}
        missing = (self._held.keys() | unwell | self._facts.keys()) - found
        scan = replace(self._scan, faults=attributed(self._scan.faults, missing))
        shared, left_out = self._shared(scan, unwell)
        listed = {gpu.uuid for gpu in scan.gpus} | {one.gpu for one in scan.faults if not one.lost}
        self._facts = {u: gpu for u, gpu in self._facts.items() if u in shared or u in listed}

        for fault in left_out:
            if fault not in self.left_out.value:
                log.warning("inventory.gpu_left_out", gpu=fault.gpu, err=fault.text)

        self.left_out.set(left_out)
        old = self._inventory.value
        by_index = sorted(
            shared.values(), key=lambda one: (one.gpu.index == NO_INDEX, one.gpu.index, one.uuid)
        )
        new = Inventory(
            generation=old.generation,
            gpus=tuple(by_index),
            driver_version=scan.driver_version,
            withheld=self._withheld,
        )
        if new != old:
            new = replace(new, generation=old.generation + 1)

        slices = slice_list(new, self._held, self._slices.value)
        if self._slices.set(slices):
            count = sum(len(group.ids) for group in slices.groups)
            healthy = sum(len(group.ids) for group in slices.groups if group.healthy)
            log.info("list.changed", slices=count, healthy=healthy, generation=slices.generation)

        self._inventory.set(new)

    def _shared(
        self, scan: Scan, unwell: set[GpuUuid]
    ) -> tuple[dict[GpuUuid, SharedGpu], tuple[GpuFault, ...]]:
        """The GPUs of the inventory; and those that are not shared, and why."""
        settings = self._settings.value
        described = {gpu.uuid: gpu for gpu in scan.gpus}
        faults = {GpuUuid(fault.gpu): fault for fault in scan.faults}
        shared: dict[GpuUuid, SharedGpu] = {}
        left_out: dict[GpuUuid, GpuFault] = {}

        for uuid in dict.fromkeys((*described, *faults, *sorted(self._held))):
            fault, is_held = faults.get(uuid), uuid in self._held
            # A GPU that the driver cannot describe has its last known facts. Of one from before the
            # start, only the UUID is known, and perhaps the index.
            known = described.get(uuid) or self._facts.get(uuid)
            gpu = known or Gpu(uuid, fault.index if fault else NO_INDEX, "", None, pci="")
            is_filtered = uuid in settings.filter_uuids or gpu.index in settings.filter_indexes
            obstacle = _obstacle(gpu, settings) if known and not is_filtered else ""
            is_wanted = not (is_filtered or (obstacle and gpu.name))
            is_lost = fault is not None and fault.lost
            is_there = uuid in described or (fault is not None and not is_lost)
            is_present = known is not None and is_there and not (is_filtered or obstacle)

            if fault and not is_filtered and not is_present:
                left_out[uuid] = replace(fault, text=obstacle or f"{fault.text}; {fault.remedy}")
            elif obstacle and uuid in described:
                left_out[uuid] = GpuFault(uuid, obstacle, index=gpu.index)

            is_missed = is_lost if known else uuid in unwell
            if not (is_present or is_held or (is_missed and is_wanted)):
                continue

            has_names = is_present and self._defined is not None
            missing = undefined((uuid,), self._edits.value, self._defined) if has_names else None
            if missing:
                left_out[uuid] = GpuFault(uuid, "; ".join(missing), index=gpu.index)

            well = Health(Condition.OK, since=self._clock.now())
            shared[uuid] = SharedGpu(
                gpu=gpu,
                health=self._health.setdefault(uuid, well),
                # Nothing was ever offered of a GPU that nobody knows and nobody holds.
                split_count=settings.split_count if known or is_held else 0,
                registered_mib=registered_mib(gpu.memory_mib, settings) or 0,
                core_percent=registered_core_percent(settings),
                type_name=type_name(gpu.name),
                mode=settings.mode,
                present=is_present and missing is None,
                there=is_present or is_there,
                obstacle=left_out[uuid].text if uuid in left_out else "",
                wanted=is_present or is_wanted,
                numa_hint=settings.numa_topology,
            )

        return shared, tuple(left_out.values())


def _obstacle(gpu: Gpu, settings: SharingSettings) -> str:
    """Why a GPU that the driver described cannot be shared. Empty: it can."""
    if not gpu.name:
        return "the driver does not report its name, which schedulers need"
    if gpu.mig_enabled or settings.mode == MIG_MODE:
        return IN_MIG_MODE if gpu.mig_enabled else NODE_OF_MIG
    if registered_mib(gpu.memory_mib, settings) is None:
        return "the driver does not report its memory; set sharing.preconfiguredMemoryMiB"
    return ""


# Amounts that the scheduler may have decided by.

WINDOW = 60.0  # seconds for which a former amount counts
LIMIT = 1024  # the most former inventories that are kept; the oldest are dropped first

Amounts = Mapping[GpuUuid, GpuUse]


class RecentlyRegistered:
    """Remembers what was registered in the last 60 s."""

    def __init__(self, inventory: Cell[Inventory]) -> None:
        self._inventory = inventory
        self._former: deque[tuple[float, Inventory]] = deque(maxlen=LIMIT)  # with its end

    async def run(self) -> None:
        """Follow the inventory for ever."""
        before = self._inventory.value
        async for inventory in self._inventory.follow():
            self._former.append((loop_time() + WINDOW, before))
            before = inventory

    def greatest(self) -> Amounts:
        """By GPU, the greatest memory (MiB) and compute (percent) registered in the window."""
        greatest: dict[GpuUuid, GpuUse] = {}
        former = [inventory for until, inventory in self._former if until >= loop_time()]
        for inventory in (*former, self._inventory.value):
            for gpu in inventory.gpus:
                use = GpuUse(gpu.registered_mib, gpu.core_percent)
                greatest[gpu.uuid] = greatest.get(gpu.uuid, GpuUse()).peak(use)
        return greatest
