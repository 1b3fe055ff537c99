"""Shows the names of threads in /proc and `top -H`: Python before 3.14 keeps them to itself."""

import contextlib
from pathlib import Path


def show_thread_name(name: str) -> None:
    """Name the calling thread for the kernel, which keeps 15 bytes. Without /proc nothing shows."""
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name, encoding="utf-8")
