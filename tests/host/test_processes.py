"""Which processes of a container exist: the kernel's files, as a node has them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent.host.node import CgroupContainers
from agent.usage import CGROUPS, READ, ContainerProcesses
from tests.fakes.offload import Inline
from tests.host.hook_space import IDENTITIES, TOP, can_mount
from tests.host.proc_node import ID, MAIN, UID, ProcNode

OTHER = "6f1c1f0e-8f5a-4a52-9d2e-6b8b8a1d0002"
SIDE = f"{UID}_side"


@pytest.fixture
def node(tmp_path):
    return ProcNode(tmp_path)


BESIDE = "a0" * 32
POD, SCOPE = f"pod{UID}", f"cri-containerd-{ID}.scope"
BURSTABLE, SLICE = "kubepods/burstable", "kubepods.slice/kubepods-burstable.slice"
UNDERSCORED = UID.replace("-", "_")


@pytest.mark.parametrize(
    ("path", "pod", "name"),
    [
        (BURSTABLE, POD, ID),
        ("kubepods", POD, ID),
        (SLICE, f"kubepods-burstable-pod{UNDERSCORED}.slice", SCOPE),
        ("kubelet/kubepods/besteffort", POD, ID),
        (f"pids/{BURSTABLE}", POD, ID),
        (f"memory/{BURSTABLE}", POD, ID),
    ],
)
def test_a_pod_is_found_wherever_the_kubelet_puts_it(tmp_path, path, pod, name):
    node = ProcNode(tmp_path, path)
    node.container([7], pod, name)

    assert {7} == node.alive(7)


def unlink(*paths: Path) -> None:
    for path in paths:
        path.unlink()


def in_another_namespace(node: ProcNode) -> None:
    unlink(node.proc / "self/ns/pid")
    (node.proc / "self/ns/pid").symlink_to("pid:[4026532400]")


UNKNOWN = {
    "the pod has no cgroup": lambda node: shutil.move(node.pods / f"pod{UID}", node.pods / OTHER),
    # The sandbox's tree has directories alone, and its processes use GPUs nevertheless.
    "its directory is no cgroup": lambda node: unlink(*node.pods.glob("*/*/cgroup.procs")),
    "another namespace": in_another_namespace,
    "no /proc": lambda node: unlink(node.proc / "self/ns/pid"),
    "processes are hidden": lambda node: unlink(node.proc / "1/status"),
    "mounts are hidden": lambda node: unlink(*node.proc.glob("*/mountinfo")),
}


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_where_the_kernel_does_not_tell_it_nothing_is_known(node, make):
    node.container([7])
    make(node)
    node.processes = ContainerProcesses(node.cgroups, node.proc)

    assert None is node.alive(7)


@pytest.mark.parametrize("made", [{"name": "pause", "mounted": ""}, {}])
def test_of_a_container_between_two_starts_no_process_exists(node, made):
    node.container([1] if made else [], **made)

    assert set() == node.alive(7)


def test_when_the_cgroup_of_the_pod_is_gone_no_process_lives_whatever_else_is_asked_about(node):
    cgroup = node.container([7])
    node.container([8], name="b" * 64, mounted=SIDE)
    assert {7} == node.alive(7, 8)
    shutil.rmtree(cgroup.parent)

    node.processes.begin([MAIN, SIDE])

    assert [set()] * 4 == [node.alive(8, name=SIDE), *(node.alive(7) for _ in range(3))]


def test_one_that_ends_and_one_that_starts_are_noticed(node):
    cgroup = node.container([7, 9])
    assert {7, 9} == node.alive(7, 9)
    node.process(70, 11, mounted=MAIN)

    (cgroup / "cgroup.procs").write_text("70\n2000\n")

    assert {7, 11} == node.alive(7, 9, 11)


def test_more_processes_or_cgroups_than_are_read_leave_it_unknown(node):
    cgroup = node.container([7])
    for times in (READ // 5 + 1, 1):
        (cgroup / "cgroup.procs").write_text("2000\n" * times)
        assert ({7} if times == 1 else None) == node.alive(7)
    for place in (cgroup, cgroup.parent):
        made = [place / f"x{number}" for number in range(CGROUPS)]
        for one in made:
            one.mkdir()
            (one / "cgroup.procs").touch()
        assert None is node.alive(7)
        for one in made:
            shutil.rmtree(one)
        assert {7} == node.alive(7)


CONTAINER = """
import os, pathlib, subprocess, sys
procs, directory, place = sys.argv[1:]
pathlib.Path(procs).write_text(str(os.getpid()))
subprocess.run(["mount", "--bind", directory, place], check=True)
inside = "sleep 60 & echo $!; exec sleep 60"
os.execvp("unshare", ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", inside])
"""
AGENT = """
import pathlib, sys
from agent.usage import ContainerProcesses
cgroups, name, *pids = sys.argv[1:]
processes = ContainerProcesses(pathlib.Path(cgroups))
for _ in range(2):
    processes.begin([name])
    alive = processes.alive(name, frozenset(map(int, pids)))
print(sorted(alive))
"""
HIDDEN = 'mount -t proc -o hidepid=invisible proc /proc && exec "$@"'
"""As ProtectProc=invisible of the unit; it does not hide processes from the group of root."""


@pytest.fixture
def real(tmp_path):
    """A cgroup of the kernel's in the place of a container's, and what the container mounts."""
    tree = Path("/sys/fs/cgroup")
    top = tree / "pids" if (tree / "pids").is_dir() else tree
    top /= f"hami-agent-test-{os.getpid()}"
    cgroup = top / f"pod{UID}" / ID
    cgroup.mkdir(parents=True)
    directory = tmp_path / "vgpu/containers" / MAIN
    directory.mkdir(parents=True)
    place = tmp_path / "usr-local-vgpu"
    place.mkdir()
    words = [sys.executable, "-c", CONTAINER, str(cgroup / "cgroup.procs"), directory, place]
    with subprocess.Popen(["unshare", "--mount", *words], stdout=subprocess.PIPE) as container:  # noqa: S603, S607 -- our own
        try:
            yield cgroup, int(container.stdout.readline())
        finally:
            end(cgroup)
    for made in (cgroup, cgroup.parent, top):
        made.rmdir()


def end(cgroup):
    """Kill the processes of the cgroup, until none is left."""
    while pids := (cgroup / "cgroup.procs").read_text().split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def can_have_cgroups() -> bool:
    """Whether this user may make cgroups and mounts here."""
    return os.geteuid() == 0 and os.access("/sys/fs/cgroup", os.W_OK) and can_mount()


@pytest.mark.process
@pytest.mark.timeout(60)
@pytest.mark.looptime(False)
@pytest.mark.skipif(not can_have_cgroups(), reason="needs root, mounts and cgroups")
@IDENTITIES
def test_the_kernel_tells_who_lives_without_roots_privileges(real, identity):
    cgroup, inside = real
    asked = ["1", str(inside), "4242"]
    agent = [sys.executable, "-c", AGENT, str(cgroup.parents[1]), MAIN, *asked]
    command = ["unshare", "--mount", "sh", "-c", HIDDEN, "sh", *identity, *agent]

    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False)  # noqa: S603 -- our own

    assert (f"[1, {inside}]\n", "") == (done.stdout, done.stderr)


# Which containers live: a directory of the cgroup tree bears their id.


def a_tree(root, *names):
    for name in names:
        (root / name).mkdir(parents=True)
    return CgroupContainers(root, Inline())


SYSTEMD = f"kubepods.slice/kubepods-besteffort-pod{UNDERSCORED}.slice"


@pytest.mark.parametrize(
    ("names", "running"),
    [
        ((f"{BURSTABLE}/pod1/{ID}", "system.slice/ssh.service"), {ID}),
        ((f"kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope",), {ID}),
        ((f"kubepods.slice/kubepods-pod1.slice/crio-{ID}.scope",), {ID}),
        ((f"kubelet/kubepods/pod1/{ID}",), {ID}),
        ((), None),
        (("system.slice",), None),
        ((f"system.slice/{BESIDE}",), None),
        ((f"{BURSTABLE}/pod{UID}/sandbox", f"system.slice/docker-{BESIDE}.scope"), None),
        ((f"{SYSTEMD}/kata_{BESIDE}",), None),
        ((SLICE,), set()),
        ((f"kubepods/pod{UID}/{BESIDE}",), set()),
        ((f"{SYSTEMD}/cri-containerd-{BESIDE}.scope",), set()),
        ((f"{SYSTEMD}/crio-conmon-{ID}.scope",), set()),
    ],
)
async def test_a_container_with_a_cgroup_lives_and_without_is_dead_if_the_tree_names_any(
    tmp_path, names, running
):
    asked = frozenset(f"containerd://{one}" for one in (ID, "c7" * 32))
    found = await a_tree(tmp_path / "cgroup", *names).running(asked)

    assert found == (None if running is None else {f"containerd://{one}" for one in running})


@pytest.mark.parametrize(
    ("names", "begun"),
    [
        ((f"{BURSTABLE}/pod{UID}",), {UID}),
        ((f"kubepods.slice/x.slice/kubepods-besteffort-pod{UNDERSCORED}.slice/c",), {UID}),
        ((f"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDERSCORED}.slice",), {UID}),
        ((), None),
        ((BURSTABLE, "kubepods/besteffort"), set()),  # right after a boot
        ((f"kubepods/{ID}",), None),  # containers without pods
        ((f"kubepods.slice/x.slice/cri-containerd-{ID}.scope",), None),  # pods of other names
    ],
)
async def test_a_pod_has_begun_once_it_has_a_cgroup_where_cgroups_name_pods(tmp_path, names, begun):
    assert begun == await a_tree(tmp_path / "cgroup", *names).begun()
