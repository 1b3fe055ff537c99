"""An image as containers of it see it: unpacked, and run by runc as the DaemonSet asks for."""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

PATIENCE: Final = 100.0
"""Seconds for what a container does to its end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """`root` holds the image's files; containers of runc are kept in `state`."""

    folder: Path
    root: Path
    state: Path

    def run(
        self, *command: str, writable: Sequence[str] = (), uid: int | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the entry point with these arguments and variables, to its end."""
        with self.started(*command, writable=writable, uid=uid, **environ) as container:
            said, complained = container.process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(command, container.process.returncode, said, complained)

    @contextlib.contextmanager
    def started(
        self,
        *command: str,
        under: Sequence[str] = (),
        writable: Sequence[str] = (),
        uid: int | None = None,
        **environ: str,
    ) -> Iterator["BundledContainer"]:
        """A container whose first process is the entry point with these arguments, or `under` it.

        Its root is read-only but for `writable`, each a file system in memory; there are no
        capabilities, no way to more rights, and no network but its own loopback.
        """
        name = f"image-{uuid.uuid4().hex[:8]}"
        place = self.folder / name
        place.mkdir()
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        config["root"] = {"path": str(self.root), "readonly": True}
        process = config["process"]
        process |= {"terminal": False, "noNewPrivileges": True, "capabilities": {}}
        process["args"] = [*under, process["args"][0], *command]
        process["env"] += [f"{name}={value}" for name, value in environ.items()]
        process.pop("oomScoreAdj", None)
        if uid is not None:
            process["user"] = {"uid": uid, "gid": uid}
        config["mounts"] += [_memory(path, process["user"]["uid"]) for path in writable]
        (place / "config.json").write_text(json.dumps(config))
        runc = ("runc", "--root", str(self.state))
        with subprocess.Popen(  # noqa: S603 -- our own arguments
            [*runc, "run", "--bundle", str(place), name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as running:
            try:
                yield BundledContainer(name, running, runc)
            finally:
                subprocess.run(  # noqa: S603 -- our own arguments
                    [*runc, "delete", "--force", name], capture_output=True, check=False
                )


@dataclasses.dataclass(frozen=True, slots=True)
class BundledContainer:
    """A running one; `process` is runc's, which has its output and ends with it."""

    name: str
    process: subprocess.Popen[str]
    runc: Sequence[str]

    def kill(self, signal: str) -> None:
        """Send its first process a signal."""
        subprocess.run(  # noqa: S603 -- our own arguments
            [*self.runc, "kill", self.name, signal], check=True
        )


def _memory(path: str, uid: int) -> dict[str, object]:
    return {
        "destination": path,
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "nodev", "mode=0700", f"uid={uid}", f"gid={uid}"],
    }


@contextlib.contextmanager
def unpacked(archive: Path, folder: Path) -> Iterator[Bundle]:
    """Unpack the image, with the mount points that a runtime would make in a writable layer."""
    layout = folder / "layout"
    for command in (
        ["skopeo", "copy", "--quiet", f"oci-archive:{archive}", f"oci:{layout}:image"],
        ["umoci", "unpack", "--image", f"{layout}:image", str(folder / "bundle")],
    ):
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603 -- our own arguments
    bundle = Bundle(folder / "bundle", folder / "bundle" / "rootfs", folder / "runc")
    try:
        yield bundle
    finally:
        shutil.rmtree(folder)
