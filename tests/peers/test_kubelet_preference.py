"""Ids that a pod uses again, and what is preferred: the model and the real kubelet alike."""

import pytest

from tests.peers.lab.nodes import first
from tests.peers.lab.space import because


async def prefer(node, plugin) -> None:
    """From now on it is asked for its preference."""
    plugin.choose(first)
    await node.come_back(plugin)


async def test_init_containers_give_their_ids_to_the_containers_after_them(node):
    async with node.plugin(count=2) as plugin:
        inits = (node.init("i"), node.init("j", count=2))
        await node.runs("p", node.container("a", count=2), inits=inits)
        one, two, three = plugin.asked
        assert {"g0", "g1"} == two == three
        assert one < two
        assert {"a": three} == await node.held("p")


async def test_what_init_containers_leave_stays_with_the_pod_until_it_ends(node):
    async with node.plugin(count=2) as plugin:
        await node.runs("p", inits=(node.init(count=2),))
        assert "Available: 0" in (await node.fails("q"))["message"]
        await node.delete("p", grace=1)
        await node.until_gone("p")

        await node.runs("r", node.container(count=2))
        assert 3 == len(plugin.asked)


async def test_a_sidecars_ids_are_not_given_again_and_reuse_asks_for_no_preference(node):
    async with node.plugin() as plugin:
        await prefer(node, plugin)
        inits = (node.sidecar("s"), node.init("i"))
        await node.runs("p", node.container("a1"), node.container("a2"), inits=inits)
        assert [
            *(("prefer", {"g0"}), ("allocate", {"g0"})),
            *(("prefer", {"g1"}), ("allocate", {"g1"})),
            ("allocate", {"g1"}),
            *(("prefer", {"g2"}), ("allocate", {"g2"})),
        ] == [(call.kind, call.ids) for call in plugin.calls]


async def test_a_part_that_is_reused_must_be_included(node):
    async with node.plugin(count=4) as plugin:
        await prefer(node, plugin)
        inits = (node.init("i", count=2), node.sidecar("s"))
        await node.runs("p", node.container("a", count=2), inits=inits)
        init, sidecar, app = plugin.asked
        (_, required, size) = plugin.preferred[-1]
        assert {"g0", "g1"} == init
        assert sidecar < init
        assert 2 == len(plugin.preferred), "the sidecar took what was left"
        assert (init - sidecar, 2) == (set(required), size)
        assert set(required) | {"g2"} == app


async def test_a_preference_is_asked_even_when_all_that_is_left_is_needed(node):
    async with node.plugin(count=2) as plugin:
        await prefer(node, plugin)
        await node.runs("p", node.container(count=2))
        ((available, required, size),) = plugin.preferred
        assert ({"g0", "g1"}, [], 2) == (set(available), required, size)


@pytest.mark.parametrize(
    ("preferred", "sure"),
    [([], set()), (["g1"], {"g1"}), (["alien", "g1"], {"g1"}), (["g0", "g1", "g2"], set())],
)
async def test_short_foreign_and_long_answers_are_made_to_fit(node, preferred, sure):
    async with node.plugin() as plugin:
        await prefer(node, plugin)
        plugin.choose(lambda *_: preferred)
        await node.runs("p", node.container(count=2))
        (ids,) = plugin.asked
        assert 2 == len(ids)
        assert sure <= ids


async def test_a_preference_that_fails_fails_the_admission_with_the_exact_text(node):
    async with node.plugin() as plugin:
        await prefer(node, plugin)
        plugin.script.prefer = None
        status = await node.fails("p")
        assert (
            because(
                "device plugin GetPreferredAllocation rpc failed with err: "
                "rpc error: code = Unimplemented desc = no preference"
            )
            == status["message"]
        )
