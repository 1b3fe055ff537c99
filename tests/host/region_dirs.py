"""Container directories with a region file, as HAMi-core leaves them."""

import struct
from pathlib import Path

from agent.hami.region import V1_2
from tests.hami_regions import region_file

NAME = "6f1c1f0e-8f5a-4a52-9d2e-6b8b8a1d0001_main"
OTHER = "6f1c1f0e-8f5a-4a52-9d2e-6b8b8a1d0002_main"
FILE = "0b0e6b2a-6a0e-4f5e-8f6e-1b6e9ac5a001.cache"


def container_dir(hook: Path, name: str = NAME) -> Path:
    """Make the directory of a container, without a region."""
    directory = hook / "vgpu" / "containers" / name
    directory.mkdir(parents=True)
    return directory


def with_region(hook: Path, name: str = NAME, file: str = "v12-two") -> Path:
    """Make the directory of a container with a region; return the region."""
    region = container_dir(hook, name) / FILE
    region.write_bytes(region_file(file).content)
    return region


def poke(region: Path, offset: int, form: str, *values: int) -> None:
    """Write numbers into the region, as a process of the container does."""
    with region.open("r+b") as opened:
        opened.seek(offset)
        opened.write(struct.pack(form, *values))


COUNT = V1_2.tail
"""Where the number of processes is."""
