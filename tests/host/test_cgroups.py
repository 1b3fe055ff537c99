"""Which containers live: a directory of the cgroup tree bears their id."""

import pytest

from agent.host.node import CgroupContainers
from tests.fakes.offload import Inline

ID = "3f" * 32
OTHER = "a0" * 32
UNDERSCORED = "0a1b2c3d_0000_4000_8000_0123456789ab"
UID = "0a1b2c3d-0000-4000-8000-0123456789ab"


def a_tree(root, *names):
    for name in names:
        (root / name).mkdir(parents=True)
    return CgroupContainers(root, Inline())


@pytest.mark.parametrize(
    "path",
    [
        f"kubepods/burstable/pod1/{ID}",
        f"kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope",
        f"kubepods.slice/kubepods-pod1.slice/crio-{ID}.scope",
        f"kubelet/kubepods/pod1/{ID}",
    ],
    ids=["cgroupfs", "systemd and containerd", "systemd and CRI-O", "nested"],
)
async def test_a_container_with_a_cgroup_lives_and_one_without_does_not(tmp_path, path):
    containers = a_tree(tmp_path, path, "system.slice/ssh.service")
    asked = frozenset({f"containerd://{ID}", f"containerd://{OTHER}"})

    assert {f"containerd://{ID}"} == await containers.running(asked)


async def test_the_monitor_of_a_dead_container_is_not_the_container(tmp_path):
    containers = a_tree(tmp_path, f"kubepods.slice/p.slice/crio-conmon-{ID}.scope")

    assert set() == await containers.running(frozenset({f"cri-o://{ID}"}))


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("system.slice",),
        (f"system.slice/{OTHER}",),
        (f"kubepods/burstable/pod{UID}/sandbox", f"system.slice/docker-{OTHER}.scope"),
        (f"kubepods.slice/kubepods-besteffort-pod{UID}.slice/kata_{OTHER}",),
    ],
    ids=["nothing", "no pods", "no pods, but a container", "other names", "a sandbox alone"],
)
async def test_a_tree_that_names_no_container_of_a_pod_says_nothing(tmp_path, names):
    containers = a_tree(tmp_path / "cgroup", *names)

    assert await containers.running(frozenset({f"containerd://{ID}"})) is None


@pytest.mark.parametrize(
    "names",
    [
        ("kubepods.slice/kubepods-burstable.slice",),
        (f"kubepods/pod{UID}/{OTHER}",),
        (f"kubepods.slice/kubepods-pod{UID}.slice/cri-containerd-{OTHER}.scope",),
        (f"kubepods.slice/kubepods-pod{UID}.slice/crio-conmon-{OTHER}.scope",),
    ],
    ids=["a node without pods", "cgroupfs", "systemd", "a monitor"],
)
async def test_a_container_without_a_cgroup_is_dead_where_others_have_theirs(tmp_path, names):
    containers = a_tree(tmp_path, *names)

    assert frozenset() == await containers.running(frozenset({f"containerd://{ID}"}))


@pytest.mark.parametrize(
    "names",
    [
        (f"kubepods/burstable/pod{UID}",),
        (f"kubepods.slice/x.slice/kubepods-besteffort-pod{UNDERSCORED}.slice/c",),
        (f"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDERSCORED}.slice",),
    ],
    ids=["cgroupfs", "systemd", "nested"],
)
async def test_a_pod_has_begun_once_it_has_a_cgroup(tmp_path, names):
    containers = a_tree(tmp_path, *names)

    assert {UID} == await containers.begun()
    assert await CgroupContainers(tmp_path / "none", Inline()).begun() is None


async def test_nobody_is_looked_for_when_nobody_is_asked_for(tmp_path):
    assert frozenset() == await CgroupContainers(tmp_path, Inline()).running(frozenset())


async def test_all_that_were_asked_for_are_found(tmp_path):
    containers = a_tree(tmp_path, f"kubepods/a/{ID}", f"kubepods/b/{OTHER}")
    asked = frozenset({f"containerd://{ID}", f"containerd://{OTHER}"})

    assert asked == await containers.running(asked)
