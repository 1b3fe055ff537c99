"""The facts of the node, each in one cell with one writer."""

import dataclasses
from collections.abc import Mapping

from agent.core.edits import EditSettings
from agent.core.inventory import Inventory
from agent.core.pods import NodeView, PodTable, PodUid
from agent.core.report_settings import ReportSettings
from agent.core.slices import SharingSettings, SliceList
from agent.kit.cell import Cell


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Cells that more than one room reads.

    Writers: sharing, report, edits — app.settings; inventory — services.inventory; slices —
    services.listing; pods — services.pods; node — services.node; outlived — services.outbox. The
    ledger's cell belongs to services.state, the registration's to services.registration, the
    reporter's own to services.report.
    """

    sharing: Cell[SharingSettings]
    report: Cell[ReportSettings]
    edits: Cell[EditSettings]
    inventory: Cell[Inventory]
    slices: Cell[SliceList]
    pods: Cell[PodTable]
    node: Cell[NodeView | None]
    outlived: Cell[Mapping[str, PodUid]]


def new_facts(sharing: SharingSettings, report: ReportSettings, edits: EditSettings) -> Facts:
    """Cells with nothing known yet."""
    return Facts(
        sharing=Cell(sharing),
        report=Cell(report),
        edits=Cell(edits),
        inventory=Cell(Inventory()),
        slices=Cell(SliceList()),
        pods=Cell(PodTable()),
        node=Cell(None),
        outlived=Cell({}),
    )
