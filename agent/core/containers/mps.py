"""Mode `mps`: connects containers to the MPS control daemon that the operator runs on the host.

In HAMi the mode is only a word of the register annotation, by which pods choose GPUs; its plugin
answers as in `hami-core`. The agent does the same. If the settings name the daemon's root, the
agent adds what a client of the daemon needs, as NVIDIA's plugin does. It does not start a daemon.
Source: NVIDIA k8s-device-plugin v0.19 internal/plugin/mps.go, cmd/mps-control-daemon/mps/root.go;
HAMi v2.10 pkg/device-plugin/nvidiadevice/nvinternal/plugin/mps.go (empty).
"""

from agent.core.containers.edits import EditSettings, MountEdit

MODE = "mps"
CONTAINER_ROOT = "/mps"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 -- where CUDA looks for it


def mps_envs(settings: EditSettings) -> tuple[tuple[str, str], ...]:
    """The variable that names the daemon's pipes; empty in other modes or without a root."""
    return (("CUDA_MPS_PIPE_DIRECTORY", _pipes(CONTAINER_ROOT, settings)),) if _on(settings) else ()


def mps_mounts(settings: EditSettings) -> tuple[MountEdit, ...]:
    """The mounts of the daemon's pipes and of the memory that it shares with its clients."""
    if not _on(settings):
        return ()
    root = settings.mps_root.rstrip("/")
    pipes = MountEdit(_pipes(CONTAINER_ROOT, settings), _pipes(root, settings), read_only=False)
    return pipes, MountEdit(SHARED_MEMORY, f"{root}/shm", read_only=False)


def _on(settings: EditSettings) -> bool:
    return settings.mode == MODE and bool(settings.mps_root)


def _pipes(root: str, settings: EditSettings) -> str:
    return f"{root}/{settings.resource}/pipe"
