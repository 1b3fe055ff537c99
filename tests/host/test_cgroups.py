"""Which containers live: a directory of the cgroup tree bears their id."""

import pytest

from agent.host.cgroups import CgroupContainers
from tests.fakes.offload import Inline

ID = "3f" * 32
OTHER = "a0" * 32


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


@pytest.mark.parametrize("names", [(), ("system.slice",)])
async def test_where_no_pods_can_be_seen_every_container_is_believed(tmp_path, names):
    containers = a_tree(tmp_path / "cgroup", *names)
    asked = frozenset({f"containerd://{ID}"})

    assert asked == await containers.running(asked)


async def test_nobody_is_looked_for_when_nobody_is_asked_for(tmp_path):
    assert frozenset() == await CgroupContainers(tmp_path, Inline()).running(frozenset())


async def test_all_that_were_asked_for_are_found(tmp_path):
    containers = a_tree(tmp_path, f"kubepods/a/{ID}", f"kubepods/b/{OTHER}")
    asked = frozenset({f"containerd://{ID}", f"containerd://{OTHER}"})

    assert asked == await containers.running(asked)
