"""What the kubelet model reads in a Pod object."""

import pytest

from agent.sandbox.kubelet.books import DeviceRecord, merge
from agent.sandbox.kubelet.pods import read_pod
from agent.wire.v1beta1 import CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount
from tests.fakes.kubelet_rig import a_container_object, a_pod_object
from tests.fakes.plugin import RESOURCE


def test_a_limit_that_is_no_whole_number_is_refused():
    container = a_container_object("a")
    container["resources"]["limits"] = {RESOURCE: "1.5"}
    with pytest.raises(ValueError, match="no whole number"):
        read_pod(a_pod_object(containers=[container]))


def test_init_containers_come_first_and_only_extended_limits_count():
    pod = read_pod(
        a_pod_object(
            inits=[a_container_object("i"), a_container_object("s", sidecar=True)],
            containers=[a_container_object("a", count=2), {"name": "bare"}],
        )
    )

    assert [("i", "init"), ("s", "sidecar"), ("a", "app"), ("bare", "app")] == [
        (c.name, c.kind) for c in pod.containers
    ]
    assert [{RESOURCE: 1}, {RESOURCE: 1}, {RESOURCE: 2}, {}] == [c.limits for c in pod.containers]
    assert "a" == pod.container("a").name
    with pytest.raises(KeyError, match="no container x"):
        pod.container("x")


@pytest.mark.parametrize(
    ("inits", "apps", "expected"),
    [
        ([], [1, 2], 3),
        ([("i", 5, False)], [1, 2], 5),
        ([("s", 2, True), ("i", 2, False)], [1], 4),
        ([("i", 2, False), ("s", 2, True)], [1], 3),
    ],
)
def test_a_pod_requests_the_greater_of_its_phases(inits, apps, expected):
    pod = a_pod_object(
        inits=[a_container_object(n, count=c, sidecar=s) for n, c, s in inits],
        containers=[a_container_object(f"a{n}", count=c) for n, c in enumerate(apps)],
    )

    assert expected == read_pod(pod).request(RESOURCE)


def test_answers_of_several_resources_are_merged_and_the_first_of_a_key_wins():
    first = ContainerAllocateResponse(
        envs={"A": "1", "B": "1"},
        mounts=[Mount("/m", "/first")],
        devices=[DeviceSpec("/dev/x", "/dev/first", "rw")],
        annotations={"k": "1"},
        cdi_devices=[CdiDevice("v/c=a")],
    )
    second = ContainerAllocateResponse(
        envs={"B": "2", "C": "2"},
        mounts=[Mount("/m", "/second"), Mount("/n", "/second")],
        devices=[DeviceSpec("/dev/x", "/dev/second", "r"), DeviceSpec("/dev/y", "/dev/y", "r")],
        annotations={"k": "2"},
        cdi_devices=[CdiDevice("v/c=a"), CdiDevice("v/c=b")],
    )

    whole = merge([DeviceRecord({}, first), DeviceRecord({}, second)])

    assert {"A": "1", "B": "1", "C": "2"} == whole.envs
    assert [("/m", "/first"), ("/n", "/second")] == [
        (m.container_path, m.host_path) for m in whole.mounts
    ]
    assert ["/dev/first", "/dev/y"] == [d.host_path for d in whole.devices]
    assert {"k": "1"} == whole.annotations
    assert ["v/c=a", "v/c=b"] == [d.name for d in whole.cdi_devices]
    assert {"A": "1", "B": "1"} == first.envs, "the recorded answers stay as they are"
    assert 1 == len(first.mounts)
