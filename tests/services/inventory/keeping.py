"""A keeper of the inventory with its cells and its lists."""

from collections.abc import Mapping

from agent.inventory import InventoryKeeper, Listing
from agent.kit.cell import Cell
from agent.model import (
    Gpu,
    GpuFault,
    GpuUuid,
    Health,
    Inventory,
    Scan,
    SharingSettings,
    SliceList,
    slice_id,
)
from tests.builders import a_uuid
from tests.fakes.clock import ManualClock


class KeepingBench:
    """What the driver says goes in, what is shared and listed comes out."""

    def __init__(
        self,
        settings: SharingSettings | None = None,
        recalled: Mapping[GpuUuid, Health] | None = None,
    ) -> None:
        self.inventory = Cell(Inventory())
        self.settings = Cell(settings or SharingSettings())
        self.keeper = InventoryKeeper(self.inventory, self.settings, ManualClock(), recalled)
        self.slices = Cell(SliceList())
        self.listing = Listing(self.inventory, self.keeper.held, self.slices)

    def scan(self, *gpus: Gpu, faults: tuple[GpuFault, ...] = ()) -> None:
        self.keeper.found(Scan("570.1", gpus, faults))
        self.listing.refresh()

    def hold(self, *numbers: int) -> None:
        held = {a_uuid(n): (slice_id(a_uuid(n), 3),) for n in numbers}
        self.keeper.hold(held)

    @property
    def shown(self) -> list[tuple[int, bool, bool]]:
        """Index, present and serving of every GPU."""
        return [(g.gpu.index, g.present, g.serving) for g in self.inventory.value.gpus]

    @property
    def kept(self) -> dict[str, int]:
        """The GPUs that are not present, with their indexes."""
        gpus = self.inventory.value.gpus
        return {gpu.uuid: gpu.gpu.index for gpu in gpus if not gpu.present}

    @property
    def generation(self) -> int:
        return self.inventory.value.generation
