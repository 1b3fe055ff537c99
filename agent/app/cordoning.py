"""Cordons a GPU at the API server for HAMi's scheduler, or ends its cordon."""

import contextlib
import random
from collections.abc import Mapping
from typing import Final

from agent.codec.node_report import read_register
from agent.core.cluster.annotations import CORDON, REGISTER
from agent.core.cluster.pods import NodeView
from agent.core.errors import AgentError, ApiConflict
from agent.core.node.cordon import CordonEdit, ReportedGpu, cordon_edit, find_gpu, known_gpus
from agent.host.kube.api import KubeNode
from agent.host.kube.connection import Connection
from agent.host.kube.session import KubeSession

PROGRAM: Final = "hami-agent-cordon"
"""The field manager: what an operator writes does not count as an agent's."""
TRIES: Final = 5
"""Writes that may be refused because the Node changed since it was read."""


class NoSuchGpu(AgentError):  # noqa: N818 -- the state, not the call, is the error
    """The Node, or the GPU on it, does not exist."""


async def plan_cordon(connection: Connection, node: str, name: str, *, cordon: bool) -> CordonEdit:
    """Read the Node and decide what would be written. Raises NoSuchGpu, ApiError, SettingsError.

    `name`: an index or UUID.
    """
    session = KubeSession(connection, random.SystemRandom(), PROGRAM)
    try:
        return _edit(await _read(KubeNode(session, node), node), name, cordon=cordon)
    finally:
        await session.close()


async def write_cordon(connection: Connection, node: str, name: str, *, cordon: bool) -> CordonEdit:
    """Write what is due; other changes of the Node in between are kept.

    Returns what was written: nothing if somebody else did so meanwhile. Raises NoSuchGpu, ApiError,
    SettingsError; ApiConflict: the Node changed between each of five reads and writes.
    """
    session = KubeSession(connection, random.SystemRandom(), PROGRAM)
    api = KubeNode(session, node)
    try:
        for _ in range(TRIES - 1):
            with contextlib.suppress(ApiConflict):
                return await _write(api, node, name, cordon=cordon)
        return await _write(api, node, name, cordon=cordon)
    finally:
        await session.close()


async def _write(api: KubeNode, node: str, name: str, *, cordon: bool) -> CordonEdit:
    seen = await _read(api, node)
    edit = _edit(seen, name, cordon=cordon)
    if edit.changes:
        await api.annotate_as_seen(seen.resource_version, edit.changes)
    return edit


async def _read(api: KubeNode, node: str) -> NodeView:
    seen = await api.get_node()
    if seen is None:
        raise NoSuchGpu(f"the API server knows no Node {node}", remedy="name it with --node")
    return seen


def _edit(node: NodeView, name: str, *, cordon: bool) -> CordonEdit:
    gpus = known_gpus(_reported(node.annotations), node.annotations.get(CORDON))
    gpu = find_gpu(gpus, name)
    if gpu is None:
        known = ", ".join(one.words for one in gpus)
        where = f"Node {node.name} has no GPU {name}"
        if not known:
            raise NoSuchGpu(f"{where}: it has no readable {REGISTER}")
        raise NoSuchGpu(where, remedy=f"it has {known}")
    return cordon_edit(gpu, node.annotations, cordon=cordon)


def _reported(annotations: Mapping[str, str]) -> list[ReportedGpu]:
    gpus = read_register(annotations.get(REGISTER))
    return [ReportedGpu(gpu.uuid, gpu.index) for gpu in gpus]
