"""A node where the agent starts: what the kubelet counts, and what HAMi's scheduler is told."""

import pytest

from agent.codec.register import decode_register
from agent.core import annotations
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.cluster import ACCOUNT
from tests.peers.lab.identities import NODE, NODE_USER


@pytest.mark.parametrize("user", [NODE_USER, ACCOUNT])
async def test_80_slices_are_allocatable_and_the_node_is_annotated(cluster, table, user):
    await cluster.start_registered_agent(user=user)

    assert 80 == len(await cluster.kubelet.allocatable(RESOURCE))
    noted = cluster.nodes.objects[NODE]["metadata"]["annotations"]
    assert 8 == len(decode_register(noted[annotations.REGISTER]))
    assert annotations.MUTEX_LOCK not in noted
