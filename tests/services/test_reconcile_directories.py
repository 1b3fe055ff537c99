"""Directories of closed rows go, and none that is held again."""

from typing_extensions import override

from agent.core.containers.container_edits import container_directory
from agent.core.state.ledger import Ledger
from agent.kit.cell import Cell
from agent.services.reconcile.directories import Directories
from tests.builders import a_row
from tests.fakes.clock import ManualClock
from tests.fakes.kubelet_side import FakeHookDirs

FIRST, SECOND = a_row(container="a"), a_row(container="b")


def name_of(row):
    return container_directory(row.key.pod_uid, row.key.container)


class Hooks(FakeHookDirs):
    """While one directory is removed, the kubelet asks for the other container again."""

    def __init__(self, ledger: Cell[Ledger]) -> None:
        super().__init__()
        self.names = {name_of(FIRST), name_of(SECOND)}
        self._ledger = ledger

    @override
    async def remove(self, name: str) -> None:
        await super().remove(name)
        self._ledger.set(Ledger((SECOND,)))


async def test_a_row_that_is_answered_again_during_the_clean_up_keeps_its_directory():
    ledger = Cell(Ledger())
    hooks = Hooks(ledger)
    directories = Directories(hooks, ledger, ManualClock())
    directories.closing((FIRST.key, SECOND.key))

    await directories.clean_up()
    assert {name_of(SECOND)} == hooks.names

    ledger.set(Ledger())
    await directories.clean_up()
    assert set() == hooks.names
