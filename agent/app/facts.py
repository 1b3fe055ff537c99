"""The shared facts of the node, each in one cell with one writer."""

from collections.abc import Mapping

import msgspec

from agent.allocate.candidates import MatchSettings
from agent.cluster import NodeView, PodTable, PodUid
from agent.hami.register import ReportSettings
from agent.kit.cell import Cell
from agent.ledger import EditSettings
from agent.model import Inventory, SharingSettings, SliceList
from agent.settings.sections import Settings


class SharedCells(msgspec.Struct, frozen=True):
    """Cells that more than one room reads.

    Each has one writer: `app.settings` for sharing, resource, report, edits and match; `inventory`
    for inventory and slices; `kube.watches` for pods and node; `settle` for outlived. `state`,
    `kubelet.register` and `report` write cells of their own.
    """

    sharing: Cell[SharingSettings]
    resource: Cell[str]
    report: Cell[ReportSettings]
    edits: Cell[EditSettings]
    match: Cell[MatchSettings]
    inventory: Cell[Inventory]
    slices: Cell[SliceList]
    pods: Cell[PodTable]
    node: Cell[NodeView | None]
    outlived: Cell[Mapping[str, PodUid]]


def new_facts(settings: Settings) -> SharedCells:
    """Cells with the settings of the start, and nothing else known yet."""
    return SharedCells(
        sharing=Cell(settings.sharing),
        resource=Cell(settings.sharing.resource),
        report=Cell(settings.report),
        edits=Cell(settings.edits),
        match=Cell(settings.match),
        inventory=Cell(Inventory()),
        slices=Cell(SliceList()),
        pods=Cell(PodTable()),
        node=Cell(None),
        outlived=Cell({}),
    )
