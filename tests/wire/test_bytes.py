"""Our bytes are the bytes that Google's protobuf writes for the same values, for every message."""

from typing import Any

import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from hypothesis import given
from hypothesis import strategies as st

from agent.wire import v1, v1beta1
from tests.wire import peer


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> DescriptorPool:
    return peer.descriptors(tmp_path_factory.mktemp("protos"))


def theirs(pool: DescriptorPool, name: str, plain: peer.Plain) -> bytes:
    message = peer.theirs(pool.FindMessageTypeByName(name), plain)
    return message.SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", peer.message_names())
@given(data=st.data())
def test_every_message_has_the_bytes_of_protobuf(
    pool: DescriptorPool, name: str, data: st.DataObject
):
    kind = pool.FindMessageTypeByName(name)
    plain = data.draw(peer.plain_values(kind))
    expected = peer.theirs(kind, plain).SerializeToString(deterministic=True)

    message = peer.ours(kind, plain)

    assert expected == bytes(message)
    assert message == type(message).parse(expected)


def test_every_message_of_the_protos_is_generated(pool: DescriptorPool):
    names = peer.message_names()

    assert len(names) == len({peer.our_class(name) for name in names})
    assert all(pool.FindMessageTypeByName(name) for name in names)


CASES: list[tuple[str, Any, Any, str]] = [
    (
        "NUMA node 0 is on the wire",
        v1beta1.Device(
            id="GPU-a-0",
            health="Healthy",
            topology=v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=0)]),
        ),
        ("v1beta1.Device", {1: "GPU-a-0", 2: "Healthy", 3: {1: [{1: 0}]}}),
        "0a074750552d612d3012074865616c7468791a020a00",
    ),
    (
        "a topology without nodes is not an absent topology",
        v1beta1.Device(id="a", topology=v1beta1.TopologyInfo()),
        ("v1beta1.Device", {1: "a", 3: {}}),
        "0a01611a00",
    ),
    (
        "an absent topology is absent",
        v1beta1.Device(id="a"),
        ("v1beta1.Device", {1: "a"}),
        "0a0161",
    ),
    (
        "an empty container response keeps its place",
        v1beta1.AllocateResponse(
            container_responses=[
                v1beta1.ContainerAllocateResponse(),
                v1beta1.ContainerAllocateResponse(envs={"A": ""}),
                v1beta1.ContainerAllocateResponse(),
            ]
        ),
        ("v1beta1.AllocateResponse", {1: [{}, {1: {"A": ""}}, {}]}),
        "0a000a070a050a014112000a00",
    ),
    (
        "an empty list is an empty message",
        v1beta1.ListAndWatchResponse(),
        ("v1beta1.ListAndWatchResponse", {}),
        "",
    ),
    (
        "a set but empty optional text is on the wire",
        v1.ClaimResource(share_id=""),
        ("v1.ClaimResource", {5: ""}),
        "2a00",
    ),
]


@pytest.mark.parametrize(
    ("message", "described", "expected"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_the_corners_of_the_format(
    pool: DescriptorPool, message: Any, described: tuple[str, peer.Plain], expected: str
):
    assert expected == bytes(message).hex()
    assert expected == theirs(pool, *described).hex()
