"""Container images without a registry: OCI layouts in one tar, as `ctr images import` takes them.

One layer, one platform: this machine's. The same arguments give the same bytes, whoever runs it.
"""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

APPLETS = (
    "cat",
    "cp",
    "env",
    "false",
    "kill",
    "ls",
    "mkdir",
    "mount",
    "mv",
    "nc",
    "sh",
    "sleep",
    "tail",
    "true",
)
DIRECTORIES = {"dev": 0o755, "etc": 0o755, "proc": 0o555, "sys": 0o555, "tmp": 0o1777}
"""Stand in every image, with these modes."""
BUSYBOX = Path("/bin/busybox")
PASSWD = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
FOREVER = "trap 'exit 0' TERM INT; sleep 2147483647 & wait"
"""`wait` takes in every orphan that process 1 inherits, and lets the trap through at once."""

_PROGRAMS = (b"#!", b"\x7fELF")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"

_Member = tuple[tarfile.TarInfo, bytes]


def write_image(
    path: Path,
    name: str,
    files: Mapping[str, Path | bytes],
    links: Mapping[str, str],
    command: Sequence[str],
) -> None:
    """Write the image `name` to the tar `path`.

    Args:
        path: The tar, replaced where it exists.
        name: The full reference by which containerd will know it, with registry and tag.
        files: By place in the image, without a leading slash: content, or the file to copy. What
            is a program by its first bytes may be run by everybody; all else is only readable.
        links: Symbolic links, by place in the image: what they point to.
        command: What a container runs that names nothing else.

    Raises:
        OSError: A file cannot be read, or the tar not written.
    """
    layer = _layer({place: _content(source) for place, source in files.items()}, links)
    described = {"architecture": _architecture(), "os": "linux"}
    config = _json(
        described
        | {
            "config": {"Cmd": list(command), "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_CONFIG, config),
            "layers": [_descriptor(_LAYER, layer)],
        }
    )
    named = _descriptor(_MANIFEST, manifest) | {
        "platform": described,
        "annotations": {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
        },
    }
    blobs = {f"blobs/sha256/{_hex(blob)}": blob for blob in (layer, config, manifest)}
    path.write_bytes(
        _tar(
            {
                "blobs": _directory(0o755),
                "blobs/sha256": _directory(0o755),
                "index.json": _file(_json({"schemaVersion": 2, "manifests": [named]})),
                "oci-layout": _file(_json({"imageLayoutVersion": "1.0.0"})),
            }
            | {place: _file(blob) for place, blob in blobs.items()}
        )
    )


def write_busybox(path: Path, name: str) -> None:
    """Write an image of a static busybox with the programs that tests run; alone it is a shell.

    Raises:
        OSError: There is no busybox, or the tar cannot be written.
    """
    _write_busybox(path, name, ["/bin/sh"])


def write_pause(path: Path, name: str) -> None:
    """Write the image of a pod's sandbox: sleeps until it is told to end, and reaps orphans.

    Raises:
        OSError: There is no busybox, or the tar cannot be written.
    """
    _write_busybox(path, name, ["/bin/sh", "-c", FOREVER])


def _write_busybox(path: Path, name: str, command: Sequence[str]) -> None:
    files: dict[str, Path | bytes] = {"bin/busybox": BUSYBOX, "etc/passwd": PASSWD}
    write_image(path, name, files, {f"bin/{applet}": "busybox" for applet in APPLETS}, command)


def _content(source: Path | bytes) -> bytes:
    return source if isinstance(source, bytes) else source.read_bytes()


def _layer(files: Mapping[str, bytes], links: Mapping[str, str]) -> bytes:
    folders = {
        str(folder): _directory(0o755)
        for place in [*files, *links]
        for folder in PurePosixPath(place).parents
        if folder.name
    }
    return _tar(
        folders
        | {place: _directory(mode) for place, mode in DIRECTORIES.items()}
        | {place: _file(content) for place, content in files.items()}
        | {place: _link(target) for place, target in links.items()}
    )


def _tar(members: Mapping[str, _Member]) -> bytes:
    """Of root, of 1970 and sorted by name, so a folder comes before what is in it."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, (member, content) in sorted(members.items()):
            member.name = name
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return written.getvalue()


def _directory(mode: int) -> _Member:
    member = tarfile.TarInfo()
    member.type, member.mode = tarfile.DIRTYPE, mode
    return member, b""


def _file(content: bytes) -> _Member:
    member = tarfile.TarInfo()
    member.mode = 0o755 if content.startswith(_PROGRAMS) else 0o644
    return member, content


def _link(target: str) -> _Member:
    member = tarfile.TarInfo()
    member.type, member.linkname, member.mode = tarfile.SYMTYPE, target, 0o777
    return member, b""


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{_hex(blob)}"


def _hex(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _architecture() -> str:
    """By Go's name, which containerd compares with its own."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())
