"""`python -m tests.bench.toll DIRECTORY SOCKET`: what an Allocate cannot do without, by itself.

For each line `BYTES NAMESPACE POD` on standard input it makes that many bytes durable in DIRECTORY,
by the promised steps and none besides, asks the kubelet at SOCKET for that pod, and says on
standard output how many milliseconds each of the two took. In a process of its own, which rests
in between as the agent does.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from grpclib import GRPCError
from grpclib.client import Channel

from agent.wire.v1 import GetPodResourcesRequest, PodResourcesListerStub
from tests.bench.figures import Figure, percentile

Toll = tuple[float, float]
"""Milliseconds for the disk, and for the question."""


def figures(allocates: Sequence[float], tolls: Sequence[Toll]) -> list[Figure]:
    """Allocates and, of the same moments, what the machine and the kubelet took by themselves.

    Pair by pair, for a shared machine is fast at one moment and slow at another.
    """
    pairs = list(zip(allocates, map(sum, tolls), strict=True))
    own = "the agent's own clock, by the sum of rpc_duration_seconds after each pod"
    paired = "pod by pod: the Allocate and what the two took by themselves just after"
    name, within = "Allocate in the agent", percentile(allocates, 99)
    return [
        Figure("allocate_p50", f"{name}, p50", "ms", allocates, own, 2.5),
        Figure("allocate_p99", f"{name}, p99", "ms", allocates, own, 10, within),
        Figure("allocate_over_both", "… over both", "x", [a / b for a, b in pairs], paired, 1.3),
    ]


async def main(directory: Path, socket: str) -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    async with Channel(path=socket) as channel:
        kubelet = PodResourcesListerStub(channel)
        while line := await lines.readline():
            size, namespace, pod = line.decode().split()
            begun = time.perf_counter()
            _replace(opened, bytes(int(size)))
            written = time.perf_counter()
            with contextlib.suppress(GRPCError):  # it does not know the pod: an answer as well
                await kubelet.get(GetPodResourcesRequest(pod, namespace))
            asked = time.perf_counter()
            sys.stdout.write(f"{(written - begun) * 1000} {(asked - written) * 1000}\n")
            sys.stdout.flush()


def _replace(directory: int, data: bytes) -> None:
    """The generation on disk, the one before kept, the names on disk."""
    handle = os.open("new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=directory)
    os.write(handle, data)
    os.fsync(handle)
    os.close(handle)
    with contextlib.suppress(FileNotFoundError):
        os.link("state", "second", src_dir_fd=directory, dst_dir_fd=directory)
        os.rename("second", "previous", src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)
    os.rename("new", "state", src_dir_fd=directory, dst_dir_fd=directory)
    os.fsync(directory)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
