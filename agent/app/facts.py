"""The shared facts of the node, each in one cell with one writer."""

from collections.abc import Mapping

import msgspec

from agent.core.allocation.settings import MatchSettings
from agent.core.cluster.pods import NodeView, PodTable, PodUid
from agent.core.containers.edits import EditSettings
from agent.core.inventory.inventory import Inventory
from agent.core.inventory.slices import SharingSettings, SliceList
from agent.core.report_settings import ReportSettings
from agent.kit.cell import Cell
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
