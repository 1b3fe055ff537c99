"""The Node with its status, other Nodes by name, and the API server's time."""

from pathlib import Path

import pytest

from agent.errors import ApiError, ApiNotFound
from agent.host.process import SystemClock
from agent.kube.reader import NodeReader
from agent.node.scheduling import NamedNode, OfferSeen
from tests.builders import NODE, NOON, RESOURCE
from tests.fakes.clock import ManualClock
from tests.fakes.http import a_session, answering
from tests.fakes.kubeworld import model_world

pytestmark = pytest.mark.looptime(False)
ACCOUNT = "system:serviceaccount:hami:hami-agent"
STATUS = {"allocatable": {RESOURCE: "12"}, "capacity": {RESOURCE: 20}}


async def test_the_node_is_seen_with_its_amounts(tmp_path: Path):
    async with model_world(tmp_path) as world:
        world.store.create("nodes", {"metadata": {"name": NODE}, "status": STATUS})
        seen = await NodeReader(world.session, NODE).look(RESOURCE, SystemClock())
        other = await NodeReader(world.session, NODE).look("other.com/gpu", SystemClock())

    assert OfferSeen(RESOURCE, 12, 20) == seen.offer
    assert OfferSeen("other.com/gpu") == other.offer
    assert NODE == seen.traces.name
    assert 0.0 == seen.skew


async def test_a_node_that_is_not_there_is_told_apart(tmp_path: Path):
    async with model_world(tmp_path) as world:
        with pytest.raises(ApiNotFound):
            await NodeReader(world.session, NODE).look(RESOURCE, SystemClock())


@pytest.mark.parametrize(
    ("identity", "other"),
    [(ACCOUNT, NamedNode.MISSING), (f"system:node:{NODE}", NamedNode.UNSEEN)],
)
async def test_another_node_is_looked_for_by_name_if_the_account_may(
    identity, other, tmp_path: Path
):
    async with model_world(tmp_path, identity) as world:
        world.store.create("nodes", {"metadata": {"name": NODE}})
        sight = NodeReader(world.session, NODE)

        assert [NamedNode.THERE, other] == [await sight.named(NODE), await sight.named("none")]


@pytest.mark.parametrize(
    ("date", "skew"),
    [
        ("Tue, 01 Sep 2026 12:00:30 GMT", 30.0),
        ("Tue, 01 Sep 2026 11:59:30 GMT", -29.0),
        ("Tue, 01 Sep 2026 14:00:00 +0200", 0.0),
        ("yesterday", None),
    ],
)
async def test_the_servers_clock_is_held_against_ours(date, skew, tmp_path: Path):
    node = b'{"metadata": {"name": "node-1", "resourceVersion": "7"}}'
    async with a_session(answering(node, Date=date), tmp_path) as session:
        seen = await NodeReader(session, NODE).look(RESOURCE, ManualClock(NOON))

    assert skew == seen.skew


async def test_what_is_no_node_is_an_error(tmp_path: Path):
    async with a_session(answering(b'{"metadata": {}}'), tmp_path) as session:
        with pytest.raises(ApiError, match="no name"):
            await NodeReader(session, NODE).look(RESOURCE, ManualClock(NOON))
