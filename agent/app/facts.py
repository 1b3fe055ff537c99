"""The shared facts of the node, each in one cell with one writer."""

from collections.abc import Mapping

import msgspec

from agent.allocate.steps import MatchSettings
from agent.cluster import NodeView, PodTable, PodUid
from agent.hami.register import ReportSettings
from agent.kit.cell import Cell
from agent.ledger import EditSettings
from agent.model import Inventory, SharingSettings, SliceList
from agent.settings.sections import Settings


class SharedCells(msgspec.Struct, frozen=True):
    """Cells that more than one package reads.

    Each cell has one writer: `app.settings` for sharing, resource, report, edits and match; in
    `agent.services` `inventory.service` for the inventory, `inventory.listing` for slices,
    `cluster.pods`, `cluster.node`, and `outbox` for outlived; `state`, `registration.service` and
    `report.service` for their own.
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
