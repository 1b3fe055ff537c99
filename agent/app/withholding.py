"""Joins the node checks: what they look for would make the agent refuse every new pod.

What can be watched is watched. Full disks and changed rights are not reported by the kernel.
"""

from collections.abc import Callable

from agent.app.adapters import Adapters
from agent.core.allocation.steps import AllocateStep
from agent.core.containers.container_edits import check_library
from agent.core.errors import StateError
from agent.host.watch import HostFileWatch
from agent.kit.cell import Cell
from agent.plugin.sockets import check_directory
from agent.services.inventory.withholding import Cue, NodeCheck
from agent.settings.sections import Settings


def looks_of(
    settings: Settings, adapters: Adapters, write_error: Cell[str]
) -> tuple[NodeCheck, ...]:
    """The node checks that these settings need. `write_error`: that of the last durable write.

    Plain mode without limits mounts nothing of HAMi-core and makes no directories.
    """
    with_core = _mounts_core(settings)

    async def state() -> None:
        if write_error.value:
            raise StateError(write_error.value)
        await adapters.disk.check()

    async def files() -> None:
        facts = await adapters.hooks.facts()
        if with_core:
            check_library(facts)

    async def directories() -> None:
        if with_core:
            await adapters.hooks.check()

    async def sockets() -> None:
        await adapters.worker.call(check_directory, settings.paths.plugins)

    async def driver() -> None:
        await adapters.worker.call(adapters.driver.check)

    return (
        NodeCheck(AllocateStep.WRITE, state, turn=2),
        NodeCheck(AllocateStep.HOOK, driver, turn=3),
        NodeCheck(AllocateStep.HOOK, files, turn=3),
        NodeCheck(AllocateStep.DIRECTORY, directories, turn=3),
        NodeCheck(AllocateStep.HOOK, sockets, turn=3),
    )


def cues_of(settings: Settings, adapters: Adapters, write_error: Cell[str]) -> tuple[Cue, ...]:
    """What tells at once that a check may have another result."""

    async def written(look: Callable[[], None]) -> None:
        async for _ in write_error.follow():
            look()

    async def library(look: Callable[[], None]) -> None:
        # Not on the thread that reads settings: this file system is another one, and may hang.
        await HostFileWatch(adapters.worker).follow(adapters.hooks.mounted, look)

    return (written, library) if _mounts_core(settings) else (written,)


def _mounts_core(settings: Settings) -> bool:
    return settings.plain is None or settings.plain.memory_limits
