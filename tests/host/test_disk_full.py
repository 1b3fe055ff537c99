"""HostDisk on a real file system that somebody else has filled, to the last byte or inode."""

import subprocess
import sys

import pytest

from tests.host.hook_space import HERE, NO_PRIVILEGES, TOP

pytestmark = HERE

SCRIPT = """
import asyncio, contextlib, os, pathlib, sys
from agent.errors import StateError
from agent.host.files import HostDisk
from tests.fakes.offload import Inline

state = pathlib.Path(sys.argv[1])

def fill():
    with contextlib.suppress(OSError):
        for number in range(100_000):
            (state.parent / f"file{number}").write_bytes(b"")
    with contextlib.suppress(OSError), (state.parent / "file0").open("ab", buffering=0) as file:
        for size in (65536, 512, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
        os.fsync(file.fileno())

async def main():
    disk = await HostDisk.open(state, Inline())
    for number in range(3):
        await disk.replace("s", b"%d" % number, keep="p")
    fill()
    for number in range(9):
        content = b"%d" % number * 7000 * number
        await disk.replace("s", content, keep="p")
        assert content == await disk.read("s")
        fill()
    with contextlib.suppress(StateError):
        await disk.replace("s", bytes(2**20), keep="p")
        print("there was room")
    disk.close()
    disk = await HostDisk.open(state, Inline())
    await disk.replace("s", b"last", keep="p")
    print((await disk.read("s"), len(await disk.read("p"))))

asyncio.run(main())
"""


def test_generation_after_generation_is_written_beside_somebody_who_fills_it(tmp_path):
    image, at = tmp_path / "image", tmp_path / "at"
    at.mkdir()
    with image.open("wb") as file:
        file.truncate(6 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-m0", "-N300", image], check=True, timeout=30)  # noqa: S603, S607 -- Debian's
    mount = f'mount -o loop {image} "$0" && exec "$@"'
    namespace = ("unshare", "--mount", "sh", "-c", mount, str(at))
    command = [*namespace, *NO_PRIVILEGES, sys.executable, "-c", SCRIPT, str(at / "state")]

    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=50, check=False)  # noqa: S603 -- our own lines

    if "loop device" in done.stderr:
        pytest.skip("no loop device here")
    assert (0, "") == (done.returncode, done.stderr)
    assert f"(b'last', {7000 * 8})\n" == done.stdout
