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
from pathlib import Path

from grpclib import GRPCError
from grpclib.client import Channel

from agent.wire.v1 import GetPodResourcesRequest, PodResourcesListerStub


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
