"""A whole cluster of one node: opened, looked at, closed."""

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, TypeVar

from agent.sandbox.lab.cluster import place_library
from tests.peers.lab.api import Watched, watching
from tests.peers.lab.control import NODE, free_ports, open_control_plane
from tests.peers.lab.grants import WithGrants
from tests.peers.lab.node import Kubelet, Runtime
from tests.peers.lab.part import NodeSpace, hierarchies, is_removed
from tests.peers.lab.placing import (
    Programs,
    Reading,
    lay_out_placing,
    placing_parts,
    register_webhook,
)

# The directory of one cluster: where it lies, who holds it, and what a killed run left behind.

_PREFIX: Final = "hp-"
_HELD: Final = "held"
"""The file that a living run has locked. A directory without it is not complete yet."""


def place() -> Path:
    """Where such directories lie: a disk that runs programs and is no overlay itself."""
    named = os.environ.get("HAMI_PEERS_ROOT")  # noqa: TID251 -- said by who runs tests/peers/run
    return Path(named or "/tmp")  # noqa: S108 -- short; what is made in there is private


@contextlib.contextmanager
def open_root() -> Iterator[Path]:
    """A directory for one cluster, short enough for unix sockets; removed afterwards.

    What runs that were killed have left beside it is removed first.
    """
    where = place()
    remove_leftovers(where, hierarchies())
    root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
    with _holding(root):
        try:
            (root / "logs").mkdir()
            yield root
        finally:
            shutil.rmtree(root)


def remove_leftovers(where: Path, trees: Sequence[Path]) -> None:
    """Remove the directories that nobody holds any more, and their cgroups below `trees`.

    What is still in use stays for the next time: the processes of a run that was killed just now
    may not have ended yet.
    """
    for held in sorted(where.glob(f"{_PREFIX}*/{_HELD}")):
        with contextlib.suppress(OSError), held.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            root = held.parent
            removed = [is_removed(tree / root.name) for tree in trees]
            if all(removed):
                shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _holding(root: Path) -> Iterator[None]:
    """Hold a directory; the kernel lets go of it when this process ends, however it does."""
    held, early = root / _HELD, root / f".{_HELD}"
    with early.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        early.rename(held)  # nobody sees it without its lock
        yield


class Cluster(WithGrants):
    """A cluster of one node with all that tests ask of it; made by `open_cluster`."""


@contextlib.asynccontextmanager
async def open_cluster(programs: Programs) -> AsyncIterator[Cluster]:
    """Everything up and the Node ready, no agent yet; all ended and removed afterwards.

    The end of every log goes to standard error if the cluster itself does not come up.
    """
    async with contextlib.AsyncExitStack() as stack:
        root = stack.enter_context(open_root())
        space = NodeSpace(root)
        stack.push_async_callback(space.close)
        await space.open()
        hook = space.view / "usr" / "local" / "vgpu"
        hook.mkdir(parents=True)
        place_library(hook, Path("/usr/local"))
        runtime = Runtime(root, space)
        stack.push_async_callback(runtime.part.kill)
        plane = await stack.enter_async_context(open_control_plane(root, programs.folder, space))
        kubelet_part = Kubelet(root, programs.folder, space, plane)
        stack.push_async_callback(kubelet_part.part.kill)
        kubelet_part.configure(runtime.socket)
        ports = free_ports(3)
        lay_out_placing(plane, ports)
        placing = placing_parts(plane, programs, space, ports)
        for part in placing:
            stack.push_async_callback(part.kill)
        seen = Watched(), Reading(programs.release, placing[1])
        for kind, watched in zip(("pods", "nodes"), seen, strict=True):
            await stack.enter_async_context(watching(plane.admin, f"/api/v1/{kind}", watched))
        parts = (plane, runtime, kubelet_part, placing, *seen)
        cluster = Cluster(root, space, *parts, programs.release)
        try:
            await _start(cluster, ports)
        except BaseException:
            sys.stderr.write(cluster.last_words() + "\n")
            raise
        stack.push_async_callback(cluster.end_agents)
        yield cluster


async def _start(cluster: Cluster, ports: list[int]) -> None:
    await cluster.runtime.start()
    await cluster.runtime.import_images()
    for part in cluster.placing:
        await part.start()
    await cluster.kubelet.start()
    await cluster.nodes.until(lambda: is_ready(cluster.nodes), 40.0, "the Node is not ready")
    await register_webhook(cluster.plane, ports[0])
    # Pods are refused until the controllers have made the default ServiceAccount.
    path = "/api/v1/namespaces/default/serviceaccounts"
    async with watching(cluster.api, path, Watched()) as accounts:
        await accounts.until(lambda: "default/default" in accounts.objects, 30.0, "no account")


def is_ready(nodes: Watched) -> bool:
    node = nodes.objects.get(NODE, {"status": {}})
    conditions = node["status"].get("conditions") or []
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and not node["spec"].get("taints")


# Something that is open while tests of one module or session run, whichever task they are in.

T = TypeVar("T")


@contextlib.asynccontextmanager
async def kept(context: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """The context's value; the context is opened and closed in one task of its own.

    A test framework runs a fixture's beginning and end in two tasks, and a TaskGroup must end in
    the one where it began.
    """
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    opened: asyncio.Future[T] = loop.create_future()

    async def keep() -> None:
        async with context as value:
            opened.set_result(value)
            await over.wait()

    task = loop.create_task(keep())
    await asyncio.wait((task, opened), return_when=asyncio.FIRST_COMPLETED)
    if not opened.done():
        task.result()  # raises what the opening has raised
    try:
        yield opened.result()
    finally:
        over.set()
        await task


# A network for the pods of a cluster, and its first Service, `kubernetes`, on it.
#
# Each pod gets an address of its own and a way to the node, no further. There is no kube-proxy: the
# gateway of the pods has the Service's address, and a relay in this process behind it.

_FIRST: Final = "00-pods.conflist"
"""Before the runtime's own: it takes the first by name."""
_FORWARDING: Final = "/proc/sys/net/ipv4/ip_forward"
_HTTPS: Final = 443
_FREEBIND: Final = 15
"""IP_FREEBIND of Linux: the address comes with the first pod."""
_CHUNK: Final = 1 << 16


@contextlib.asynccontextmanager
async def open_pod_network(cluster: Cluster) -> AsyncIterator[None]:
    """Pods that are created while the block runs get addresses."""
    # The plugin would have the whole machine forward packets, which nobody here needs.
    mask = cluster.root / "ip-forward"
    mask.write_text("0\n")
    command = cluster.space.command(("mount", "--bind", str(mask), _FORWARDING))
    mounted = await asyncio.create_subprocess_exec(*command)
    assert await mounted.wait() == 0
    gateway, port = cluster.plane.service, int(cluster.plane.server.rpartition(":")[2])
    network = gateway.rpartition(".")[0]
    addresses = {"subnet": f"{network}.0/24", "rangeStart": f"{network}.128", "gateway": gateway}
    described = {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [{"type": "ptp", "ipam": {"type": "host-local", "ranges": [[addresses]]}}],
    }
    file = cluster.root / "cni" / _FIRST
    file.write_text(json.dumps(described))
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_IP, _FREEBIND, 1)
    listening.bind((gateway, _HTTPS))
    async with await asyncio.start_server(functools.partial(_relay, port), sock=listening):
        try:
            yield
        finally:
            file.unlink()


async def _relay(port: int, inwards: asyncio.StreamReader, outwards: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(inwards, writer))
            group.create_task(_pump(reader, outwards))
    outwards.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One direction, to its end, which is the other side's end too."""
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
    writer.close()
