"""A ConfigMap as the kubelet mounts it: its files are links into a directory that is swapped.

Source: Kubernetes pkg/volume/util/atomic_writer.go.
"""

import shutil
from pathlib import Path


class MountedMap:
    """The mount at `root`, which is made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._turn = 0
        root.mkdir()

    def write(self, **files: str) -> None:
        """The map has these keys now, and no others; a key is a file name without its ending."""
        self._turn += 1
        fresh = self.root / f"..2026_{self._turn}"
        fresh.mkdir()
        for name, text in files.items():
            (fresh / f"{name}.yaml").write_text(text)
        (self.root / "..data_tmp").symlink_to(fresh.name)
        (self.root / "..data_tmp").rename(self.root / "..data")
        for name in files:
            link = self.root / f"{name}.yaml"
            if not link.is_symlink():
                link.symlink_to(f"..data/{name}.yaml")
        for link in self.root.glob("[!.]*.yaml"):
            if link.stem not in files:
                link.unlink()
        for old in self.root.glob("..2026_*"):
            if old != fresh:
                shutil.rmtree(old)
