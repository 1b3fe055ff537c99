"""Describes a GPU by the library's answers. All functions block and run on the GPU's thread."""

from collections.abc import Collection
from pathlib import Path

from agent.core.inventory.gpu import Gpu, GpuFault, GpuUuid, Trouble
from agent.core.inventory.slices import MIB
from agent.host.nvml.handles import Handles
from agent.host.nvml.library import Handle, NvmlLibrary, maybe, text_of


def bus_id(text: str) -> str:
    """Convert a PCI bus id of NVML to the form of sysfs: at least four digits of the domain.

    Domains above ffff are virtual (VMD, some clouds). Other text stays as it is.
    """
    domain, _, rest = text.lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}" if rest else text.lower()


def numa_node(sys_root: Path, bus: str) -> int | None:
    """The NUMA node of a PCI address, or None when the kernel gives none."""
    path = sys_root / "bus/pci/devices" / bus / "numa_node"
    try:
        node = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def describe(library: NvmlLibrary, handles: Handles, index: int, sys_root: Path) -> Gpu:
    """Describe GPU `index`, without its links. Raises NVMLError, GpuError when it is released."""
    handle = handles.of_index(index)
    bus = bus_id(text_of(library.nvmlDeviceGetPciInfo(handle).busId))
    mig = maybe(library, lambda: library.nvmlDeviceGetMigMode(handle)[0])
    return Gpu(
        uuid=GpuUuid(text_of(library.nvmlDeviceGetUUID(handle))),
        index=index,
        name=text_of(library.nvmlDeviceGetName(handle)),
        memory_mib=_memory_mib(library, handle),
        pci=bus,
        numa=numa_node(sys_root, bus),
        minor=maybe(library, lambda: library.nvmlDeviceGetMinorNumber(handle)),
        mig_enabled=bool(mig),
    )


def unlisted(sys_root: Path, described: Collection[str]) -> tuple[GpuFault, ...]:
    """The GPUs of the kernel's driver whose address was never `described`; none if sysfs is hidden.

    The library passes over a GPU whose device file it cannot open. In a container that is each GPU
    that came after its start.
    """
    bound = {link.name for link in (sys_root / "bus/pci/drivers/nvidia").glob("*:*:*.*")}
    text = "the kernel's driver has it, and its device file is missing or closed to the agent"
    return tuple(
        GpuFault(address, text, Trouble.UNLISTED) for address in sorted(bound - set(described))
    )


def _memory_mib(library: NvmlLibrary, handle: Handle) -> int | None:
    """The GPU's memory in MiB; None for a GPU with the host's memory, which does not report it."""
    memory = maybe(library, lambda: int(library.nvmlDeviceGetMemoryInfo(handle).total))
    return None if memory is None else memory // MIB
