"""Reads what `explain` needs from the API server, by a kubeconfig alone."""

import contextlib
import random
from collections.abc import AsyncIterator
from typing import Final

from agent.core.cluster.snapshot import ClusterSnapshot, RefusedPod
from agent.core.errors import ApiNotFound
from agent.core.ports import Clock
from agent.host.kube.cluster.reader import ClusterReader, NoSuchPod
from agent.host.kube.connection import Connection, check
from agent.host.kube.session import KubeSession

PROGRAM: Final = "hami-agent-explain"


async def read_cluster(
    connection: Connection, namespace: str, name: str, clock: Clock
) -> ClusterSnapshot | NoSuchPod:
    """Read the pod and the parts of the cluster that decide about it; nothing is written.

    If there is no such pod, return the names that may have been meant.

    Raises:
        SettingsError: the files of the connection cannot be used.
        ApiError: the pod cannot be read.
    """
    async with _reader(connection, clock) as reader:
        try:
            return await reader.snapshot(namespace, name)
        except ApiNotFound:
            return await reader.similar(namespace, name)


async def read_refused(
    connection: Connection, namespace: str, clock: Clock
) -> tuple[RefusedPod, ...]:
    """Read the pods that kubelets refused; `namespace` empty: of all namespaces.

    Raises:
        SettingsError: the files of the connection cannot be used.
        ApiError: the pods cannot be read.
    """
    async with _reader(connection, clock) as reader:
        return await reader.refused(namespace)


@contextlib.asynccontextmanager
async def _reader(connection: Connection, clock: Clock) -> AsyncIterator[ClusterReader]:
    check(connection)
    session = KubeSession(connection, random.SystemRandom(), PROGRAM)
    try:
        yield ClusterReader(session, clock)
    finally:
        await session.close()
