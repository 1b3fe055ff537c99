"""Reads what `explain` needs from the API server, by a kubeconfig alone."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from agent.codec.status_document import StatusDocument, open_envelope
from agent.core.cluster.annotations import ALLOCATED
from agent.core.cluster.snapshot import ClusterSnapshot, HeldUse, RefusedPod
from agent.core.errors import ApiError, ApiNotFound, MalformedText
from agent.core.ports import Clock
from agent.host.kube.cluster.node_reader import NodeReader
from agent.host.kube.cluster.reader import ClusterReader, NoSuchPod
from agent.host.kube.connection import Connection, check
from agent.host.kube.session import KubeSession

PROGRAM: Final = "hami-agent-explain"
USE_DEADLINE: Final = 3.0
"""Seconds for the agent to say what the pod uses."""


async def read_cluster(
    connection: Connection, namespace: str, name: str, clock: Clock
) -> ClusterSnapshot | NoSuchPod:
    """Read the pod and the parts of the cluster that decide about it; nothing is written.

    If there is no such pod, return the names that may have been meant.

    Raises:
        SettingsError: the files of the connection cannot be used.
        ApiError: the pod cannot be read.
    """
    async with _session(connection) as session:
        reader = ClusterReader(session, clock)
        try:
            found = await reader.snapshot(namespace, name)
        except ApiNotFound:
            return await reader.similar(namespace, name)
        return await _with_use(session, found)


async def read_refused(
    connection: Connection, namespace: str, clock: Clock
) -> tuple[RefusedPod, ...]:
    """Read the pods that kubelets refused; `namespace` empty: of all namespaces.

    Raises:
        SettingsError: the files of the connection cannot be used.
        ApiError: the pods cannot be read.
    """
    async with _session(connection) as session:
        return await ClusterReader(session, clock).refused(namespace)


async def _with_use(session: KubeSession, found: ClusterSnapshot) -> ClusterSnapshot:
    """The snapshot with what a running pod uses, if it has shares and its agent answers in time."""
    metadata, node = found.pod["metadata"], found.pod["spec"].get("nodeName", "")
    is_running = found.pod["status"].get("phase") == "Running"
    if not is_running or ALLOCATED not in (metadata.get("annotations") or {}):
        return found
    try:
        async with asyncio.timeout(USE_DEADLINE):
            answer = await NodeReader(session, node).by_agent()
        status, _ = open_envelope(answer, "Status", StatusDocument)
    except (ApiError, MalformedText) as error:
        return msgspec.structs.replace(found, use_unread=f"the agent was not read: {error}")
    except TimeoutError:
        text = f"the agent of {node} has not answered in {USE_DEADLINE:g} s"
        return msgspec.structs.replace(found, use_unread=text)
    uses = tuple(
        HeldUse(one.container, share.uuid, share.used_mib, one.last_kernel)
        for one in status.allocations or ()
        for share in one.shares
        if (one.namespace, one.pod) == (metadata.get("namespace"), metadata.get("name"))
    )
    return msgspec.structs.replace(found, uses=uses)


@contextlib.asynccontextmanager
async def _session(connection: Connection) -> AsyncIterator[KubeSession]:
    check(connection)
    session = KubeSession(connection, random.SystemRandom(), PROGRAM)
    try:
        yield session
    finally:
        await session.close()
