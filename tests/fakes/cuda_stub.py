"""The C stub of the CUDA driver and its management library, for HAMi-core's library to load."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest


def build_cuda(folder: Path) -> Path:
    """The folder with libcuda.so.1 and libnvidia-ml.so.1; skips where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) to build the stub library with")
    # NVIDIA's calls itself within, past whatever is preloaded.
    flags = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-Bsymbolic")
    source = Path(__file__).with_suffix(".c")
    subprocess.run(  # noqa: S603 -- the compiler that PATH names, on our own file
        [compiler, *flags, "-o", folder / "libcuda.so.1", source, "-ldl", "-lpthread"],
        check=True,
        timeout=60,
    )
    (folder / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")
    return folder


class CudaStub:
    """What the driver in `folder` knows. A process is named by its pid on the host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._library = ctypes.CDLL(str(folder / "libcuda.so.1"))
        for name in ("stub_launches", "stub_used", "stub_context"):
            getattr(self._library, name).restype = ctypes.c_ulonglong

    @property
    def context(self) -> int:
        """Bytes that the context of a process takes on a GPU."""
        return int(self._library.stub_context())

    def busy(self, pid: int, gpu: int, percent: int) -> None:
        """Say what the GPU did for a process lately. The process must have a context."""
        assert self._library.stub_busy(pid, gpu, percent) == 0

    def launches(self, pid: int) -> int:
        """How many kernels of the process have reached the driver."""
        return int(self._library.stub_launches(pid))

    def used(self, gpu: int) -> int:
        """Bytes that all processes hold on the GPU."""
        return int(self._library.stub_used(gpu))
