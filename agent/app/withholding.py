"""Joins the node checks: what they look for would make the agent refuse every new pod."""

from agent.app.adapters import Adapters
from agent.core.allocation.steps import AllocateStep
from agent.core.containers.container_edits import check_library
from agent.core.errors import StateError
from agent.kit.cell import Cell
from agent.plugin.sockets import check_directory
from agent.services.inventory.withholding import NodeCheck
from agent.settings.sections import Settings


def looks_of(
    settings: Settings, adapters: Adapters, write_error: Cell[str]
) -> tuple[NodeCheck, ...]:
    """The node checks that these settings need. `write_error`: that of the last durable write.

    Plain mode without limits mounts nothing of HAMi-core and makes no directories.
    """
    plain = settings.plain
    with_core = plain is None or plain.memory_limits

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

    return (
        NodeCheck(AllocateStep.WRITE, state),
        NodeCheck(AllocateStep.HOOK, files),
        NodeCheck(AllocateStep.DIRECTORY, directories),
        NodeCheck(AllocateStep.HOOK, sockets),
    )
