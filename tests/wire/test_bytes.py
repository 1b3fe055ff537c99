"""Our bytes are the bytes that Google's protobuf writes for the same values, for every message."""

import pytest
from google.protobuf.descriptor_pool import DescriptorPool

from tests.wire import peer


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> DescriptorPool:
    return peer.descriptors(tmp_path_factory.mktemp("protos"))


@pytest.mark.parametrize("name", peer.message_names())
def test_every_message_has_the_bytes_of_protobuf(pool: DescriptorPool, name: str):
    kind = pool.FindMessageTypeByName(name)
    for plain in peer.plain_values(kind):
        expected = peer.theirs(kind, plain).SerializeToString(deterministic=True)
        message = peer.ours(kind, plain)

        assert expected == bytes(message)
        assert message == type(message).parse(expected)


def test_every_message_of_the_protos_is_generated(pool: DescriptorPool):
    names = peer.message_names()

    assert len(names) == len({peer.our_class(name) for name in names})
    assert all(pool.FindMessageTypeByName(name) for name in names)


ANSWERS = {1: [{}, {1: {"A": ""}}, {}]}
CORNERS = {
    "NUMA node 0 is on the wire": (
        *("v1beta1.Device", {1: "GPU-a-0", 2: "Healthy", 3: {1: [{1: 0}]}}),
        "0a074750552d612d3012074865616c7468791a020a00",
    ),
    "no nodes, but a topology": ("v1beta1.Device", {1: "a", 3: {}}, "0a01611a00"),
    "an absent topology": ("v1beta1.Device", {1: "a"}, "0a0161"),
    "an empty answer has its place": (
        "v1beta1.AllocateResponse",
        ANSWERS,
        "0a000a070a050a014112000a00",
    ),
    "an empty list": ("v1beta1.ListAndWatchResponse", {}, ""),
    "an optional text that is set but empty": ("v1.ClaimResource", {5: ""}, "2a00"),
}


@pytest.mark.parametrize(("name", "plain", "expected"), CORNERS.values(), ids=CORNERS)
def test_the_corners_of_the_format(
    pool: DescriptorPool, name: str, plain: peer.Plain, expected: str
):
    kind = pool.FindMessageTypeByName(name)

    assert expected == bytes(peer.ours(kind, plain)).hex()
    assert expected == peer.theirs(kind, plain).SerializeToString().hex()
