"""Reads the status of one node for commands, by a kubeconfig alone."""

import datetime as dt
import difflib
import random
from typing import Final

import msgspec

from agent.codec.observed_status import observed_status
from agent.codec.status_document import StatusDocument, open_envelope
from agent.core.errors import AgentError, ApiError, MalformedText
from agent.core.ports import Clock
from agent.host.kube.cluster.node_reader import NodeReader
from agent.host.kube.connection import Connection, check
from agent.host.kube.lists import EndlessList
from agent.host.kube.session import KubeSession

PROGRAM: Final = "hami-agent-status"
NEAREST: Final = 3


class NoSuchNode(AgentError):  # noqa: N818 -- names what was found
    """The cluster has no Node of that name."""


class NodeRead(msgspec.Struct, frozen=True):
    """What was read. `missing`: why the agent itself was not read; empty if it was."""

    found: StatusDocument
    at: dt.datetime
    missing: str = ""


async def read_node(
    connection: Connection, node: str, resource: str, clock: Clock, *, ask: bool = True
) -> NodeRead:
    """Read the agent of the node through the API server; where it does not answer, the objects.

    Without `ask` the objects at once, which are what HAMi's scheduler reads.

    Raises:
        SettingsError: the files of the connection cannot be used.
        NoSuchNode: there is no such Node; the text has the nearest names.
        ApiError: the Node or its pods cannot be read.
    """
    check(connection)
    session = KubeSession(connection, random.SystemRandom(), PROGRAM)
    reader = NodeReader(session, node)
    missing = ""
    try:
        try:
            if ask:
                found, at = open_envelope(await reader.by_agent(), "Status", StatusDocument)
                return NodeRead(found, at)
        except EndlessList:
            raise  # its objects would not end either
        except (ApiError, MalformedText) as error:
            missing = str(error)
        at = clock.now()
        objects = await reader.objects(resource)
        if objects is None:
            raise NoSuchNode(_unknown(node, await reader.names()))
        try:
            found = observed_status(objects.node, objects.pods, resource, at)
        except MalformedText as error:
            raise ApiError(f"the register annotation of {node} cannot be read: {error}") from error
        return NodeRead(found, at, missing)
    finally:
        await session.close()


def _unknown(node: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(node, known, n=NEAREST, cutoff=0.5) or known[:NEAREST]
    there = f"; the nearest names are {', '.join(near)}" if near else ""
    return f"the cluster has no Node {node}{there}"
