"""A program that uses CUDA as it is told: a command a line comes in, its result a line goes out.

It is started by the interpreter alone, with HAMi-core's library preloaded.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
OK = 0


def main() -> None:
    """Do what each line says until the input ends. An exit runs the library's own handler."""
    host_pid = Path(os.environ["STUB_PROC"], "self").readlink()  # noqa: TID251 -- given to it alone
    print(os.getpid(), host_pid, flush=True)  # noqa: T201
    cuda = ctypes.CDLL("libcuda.so.1")
    held: list[int] = []
    for line in sys.stdin:
        verb, *words = line.split()
        print(*VERBS[verb](cuda, held, *map(int, words)), flush=True)  # noqa: T201


def start(cuda: ctypes.CDLL, _held: list[int], gpu: int) -> tuple[int]:
    """Initialise CUDA and make the GPU's primary context the current one."""
    context = ctypes.c_void_p()
    return (
        cuda.cuInit(0)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
        or cuda.cuCtxSetCurrent(context),
    )


def ask_nvml(_cuda: ctypes.CDLL, _held: list[int]) -> tuple[int]:
    """Initialise the management library, as nvidia-smi does."""
    return (ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2(),)


def allocate(cuda: ctypes.CDLL, held: list[int], mib: int) -> tuple[int]:
    """Allocate memory on the current GPU."""
    return _allocated(held, cuda.cuMemAlloc_v2, ctypes.c_size_t(mib * MIB))


def allocate_ordered(cuda: ctypes.CDLL, held: list[int], mib: int) -> tuple[int]:
    """Allocate memory in the order of the default stream."""
    return _allocated(held, cuda.cuMemAllocAsync, ctypes.c_size_t(mib * MIB), None)


def allocate_managed(cuda: ctypes.CDLL, held: list[int], mib: int) -> tuple[int]:
    """Allocate memory that the driver moves between host and GPU."""
    return _allocated(held, cuda.cuMemAllocManaged, ctypes.c_size_t(mib * MIB), 1)


def _allocated(held: list[int], call: "ctypes._FuncPointer", *arguments: object) -> tuple[int]:
    at = ctypes.c_ulonglong()
    code = int(call(ctypes.byref(at), *arguments))
    if code == OK:
        held.append(at.value)
    return (code,)


def free(cuda: ctypes.CDLL, held: list[int]) -> tuple[int]:
    """Free what was allocated last."""
    return (cuda.cuMemFree_v2(ctypes.c_ulonglong(held.pop())),)


def churn(cuda: ctypes.CDLL, held: list[int], times: int) -> tuple[int]:
    """Allocate and free so many times."""
    return (sum(allocate(cuda, held, 1)[0] or free(cuda, held)[0] for _ in range(times)),)


def tell(cuda: ctypes.CDLL, _held: list[int]) -> tuple[int, int, int]:
    """What CUDA says of the current GPU's memory: free and total bytes."""
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    code = cuda.cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(total))
    return code, left.value, total.value


def launch(cuda: ctypes.CDLL, _held: list[int], blocks: int) -> tuple[int]:
    """Launch a kernel of so many blocks."""
    return (cuda.cuLaunchKernel(None, blocks, 1, 1, 32, 1, 1, 0, None, None, None),)


def launch_graph(cuda: ctypes.CDLL, _held: list[int]) -> tuple[int]:
    return (cuda.cuGraphLaunch(None, None),)


VERBS: dict[str, Callable[..., tuple[int, ...]]] = {
    "start": start,
    "nvml": ask_nvml,
    "allocate": allocate,
    "ordered": allocate_ordered,
    "managed": allocate_managed,
    "free": free,
    "churn": churn,
    "tell": tell,
    "launch": launch,
    "graph": launch_graph,
}

if __name__ == "__main__":
    main()
