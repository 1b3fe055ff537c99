"""What an image in an OCI archive weighs, as JSON: what travels, and what lies on a node's disk."""

# ruff: noqa: INP001 -- a script, no package

import gzip
import json
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def measure(archive: Path) -> dict[str, int]:
    """Bytes of the layers as they travel and unpacked, and how many there are."""
    with tarfile.open(archive) as files:

        def blob(digest: str) -> bytes:
            opened = files.extractfile("blobs/" + digest.replace(":", "/"))
            assert opened is not None, digest  # noqa: S101 -- the archive is ours
            return opened.read()

        index = files.extractfile("index.json")
        assert index is not None, archive  # noqa: S101 -- the archive is ours
        manifest = json.loads(blob(json.loads(index.read())["manifests"][0]["digest"]))
        layers: Sequence[Mapping[str, Any]] = manifest["layers"]
        unpacked = sum(_unpacked(blob(layer["digest"])) for layer in layers)
    packed = sum(layer["size"] for layer in layers)
    return {"packed": packed, "unpacked": unpacked, "layers": len(layers)}


def _unpacked(layer: bytes) -> int:
    return len(gzip.decompress(layer)) if layer.startswith(b"\x1f\x8b") else len(layer)


if __name__ == "__main__":
    path, digest, again, revision, seconds = sys.argv[1:]
    said = {"digest": digest, "again": again, "revision": revision, "seconds": int(seconds)}
    facts = said | measure(Path(path))
    sys.stdout.write(json.dumps(facts, indent=2) + "\n")
