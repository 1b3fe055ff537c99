"""The files by which a node's kernel tells about the processes of containers."""

from pathlib import Path

from agent.usage import INIT_NAMESPACE, ContainerProcesses

UID = "6f1c1f0e-8f5a-4a52-9d2e-6b8b8a1d0001"
MAIN = f"{UID}_main"
ID = "3f" * 32


class ProcNode:
    """The cgroup tree and /proc of a node."""

    def __init__(self, top: Path, path: str = "kubepods/burstable") -> None:
        self.cgroups, self.proc = top / "cgroup", top / "proc"
        self.pods = self.cgroups / path
        self.containers = 0
        (self.proc / "self/ns").mkdir(parents=True)
        (self.proc / "self/ns/pid").symlink_to(INIT_NAMESPACE)
        self.process(1, 1)
        self.cgroups.mkdir()
        self.processes = ContainerProcesses(self.cgroups, self.proc)

    def process(self, pid: int, *in_container: int, mounted: str = "") -> None:
        """A process of the host, with the PIDs in nested namespaces, and what it has mounted."""
        (self.proc / f"{pid}").mkdir()
        numbers = "\t".join(map(str, (pid, *in_container)))
        (self.proc / f"{pid}/status").write_text(f"Name:\tx\nNSpid:\t{numbers}\nNSsid:\t9\n")
        mounts = "22 1 0:5 / /proc rw - proc proc rw\n"
        if mounted:
            mounts += (
                f"23 1 8:1 /usr/local/vgpu/containers/{mounted} /usr/local/vgpu rw - ext4 a b\n"
            )
        (self.proc / f"{pid}/mountinfo").write_text(mounts)

    def container(self, pids, pod=f"pod{UID}", name=ID, mounted=MAIN) -> Path:
        """A container with processes of these PIDs; on the host the first one's begin at 2000."""
        cgroup = self.pods / pod / name
        cgroup.mkdir(parents=True)
        self.containers += 1
        first = 1000 + 1000 * self.containers
        hosts = [first + number for number in range(len(pids))]
        for host, pid in zip(hosts, pids, strict=True):
            self.process(host, pid, mounted=mounted)
        (cgroup / "cgroup.procs").write_text("".join(f"{host}\n" for host in hosts))
        return cgroup

    def alive(self, *pids: int, name: str = MAIN) -> set[int] | None:
        """Which of the PIDs exist; None: not known."""
        for _ in range(2):  # one to ask, one to know
            self.processes.begin([name])
            found = self.processes.alive(name, frozenset(pids))
        return None if found is None else set(found)
