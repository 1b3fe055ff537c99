"""Files that HAMi-core itself wrote, and reading a region from bytes instead of a file."""

import base64
import dataclasses
import functools
import json
import pathlib
import zlib
from typing import Any

from agent.hami.region import NoRegion, RegionState, read_region
from tests.fakes.regions import RegionReading

FILE = pathlib.Path(__file__).parent / "vectors" / "hami-core-vectors.json"


@dataclasses.dataclass(frozen=True)
class RegionFile:
    """One file: its bytes, and its fields in the words of HAMi-core."""

    id: str
    layout: str
    content: bytes
    fields: dict[str, Any]

    def __str__(self) -> str:
        return self.id


@functools.cache
def document() -> dict[str, Any]:
    """All of the vectors."""
    return json.loads(FILE.read_text(encoding="utf-8"))


@functools.cache
def region_file(name: str) -> RegionFile:
    """The file of that id."""
    (found,) = (file for file in document()["files"] if file["id"] == name)
    content = zlib.decompress(base64.b64decode(found["zlib_b64"]))
    return RegionFile(name, found["layout"], content, found["fields"])


def file_ids() -> list[str]:
    """The ids of all files."""
    return [file["id"] for file in document()["files"]]


def mutate(mutation: dict[str, Any]) -> bytes:
    """The bytes of a file after the mutation that the vectors name."""
    content = bytearray(region_file(mutation["base"]).content)
    match mutation["op"]:
        case "zero_all":
            return bytes(len(content))
        case "truncate":
            return bytes(content[: mutation["size"]])
        case "set":
            new = bytes.fromhex(mutation["hex"])
            content[mutation["offset"] : mutation["offset"] + len(new)] = new
            return bytes(content)
        case other:
            raise AssertionError(other)


def read_bytes(content: bytes | bytearray, size: int | None = None) -> RegionReading:
    """The reading of a file with this content; `size`: what it had when it was opened."""

    def pread(length: int, offset: int) -> bytes:
        return bytes(content[offset : offset + length])

    try:
        region = read_region(len(content) if size is None else size, pread)
    except NoRegion as error:
        return RegionReading(error.sums.state, reason=error.sums.reason)
    return RegionReading(RegionState.READABLE, region)
