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
