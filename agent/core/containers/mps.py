"""Mode `mps`: how a container finds the MPS control daemon that the operator runs on the host.

HAMi's plugin knows the mode as a word of the register annotation, by which pods choose GPUs, and
answers in it as in `hami-core`. So does the agent, and, where it is told the daemon's root, it adds
what a client of the daemon needs, as NVIDIA's plugin does. It starts no daemon and looks for none.
Source: NVIDIA k8s-device-plugin v0.19 internal/plugin/mps.go, cmd/mps-control-daemon/mps/root.go;
HAMi v2.10 pkg/device-plugin/nvidiadevice/nvinternal/plugin/mps.go (empty).
"""

from agent.core.containers.edits import EditSettings, MountEdit

MODE = "mps"
CONTAINER_ROOT = "/mps"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 -- where CUDA looks for it


def mps_envs(settings: EditSettings) -> tuple[tuple[str, str], ...]:
    """Where CUDA finds the daemon's pipes; nothing in other modes or without a root."""
    return (("CUDA_MPS_PIPE_DIRECTORY", _pipes(CONTAINER_ROOT, settings)),) if _on(settings) else ()


def mps_mounts(settings: EditSettings) -> tuple[MountEdit, ...]:
    """The daemon's pipes, and the shared memory that it and its clients have in common."""
    if not _on(settings):
        return ()
    root = settings.mps_root.rstrip("/")
    pipes = MountEdit(_pipes(CONTAINER_ROOT, settings), _pipes(root, settings), read_only=False)
    return pipes, MountEdit(SHARED_MEMORY, f"{root}/shm", read_only=False)


def _on(settings: EditSettings) -> bool:
    return settings.mode == MODE and bool(settings.mps_root)


def _pipes(root: str, settings: EditSettings) -> str:
    return f"{root}/{settings.resource}/pipe"
