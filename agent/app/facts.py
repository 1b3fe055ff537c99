"""The facts of the node, each in one cell with one writer."""

import dataclasses

from agent.core.edits import EditSettings
from agent.core.inventory import Inventory
from agent.core.pods import NodeView, PodTable
from agent.core.slices import SharingSettings, SliceList
from agent.kit.cell import Cell
from agent.services.report import ReportState


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Cells that more than one room reads.

    Writers: sharing, edits — reload; inventory — services.inventory; slices — services.listing;
    pods — services.pods; node — services.node; report — services.report. The ledger's cell belongs
    to services.state, the registration's to services.registration.
    """

    sharing: Cell[SharingSettings]
    edits: Cell[EditSettings]
    inventory: Cell[Inventory]
    slices: Cell[SliceList]
    pods: Cell[PodTable]
    node: Cell[NodeView | None]
    report: Cell[ReportState]


def new_facts(sharing: SharingSettings, edits: EditSettings) -> Facts:
    """Cells with nothing known yet."""
    return Facts(
        sharing=Cell(sharing),
        edits=Cell(edits),
        inventory=Cell(Inventory()),
        slices=Cell(SliceList()),
        pods=Cell(PodTable()),
        node=Cell(None),
        report=Cell(ReportState()),
    )
