"""Which ids a container gets and what the plugin is asked: the model and the real kubelet alike.

Only the model is tried on what a real kubelet shows after hours or with two NUMA nodes: hints of
the topology manager, and a resource that is gone after its five minutes. How answers of several
resources are merged into a container is left to tests of the agent's own containers.
"""

import asyncio
from pathlib import Path

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.fakes.plugin import a_device, answer
from tests.peers.lab.space import because

TEXT = "test refusal, second sentence. [HA-3f9c]"
REFUSED = GRPCError(Status.FAILED_PRECONDITION, TEXT)
GO_TEXT = f"rpc error: code = FailedPrecondition desc = {TEXT}"


def too_few(node, *, requested: int, available: int) -> str:
    numbers = f"Requested: {requested}, Available: {available}"
    return because(f"requested number of devices unavailable for {node.resource}. {numbers}")


async def test_each_container_is_one_allocate_with_one_container_request(node):
    async with node.plugin() as plugin:
        await node.runs("p", node.container("a"), node.container("b", count=2))
        assert [1, 2] == [len(ids) for ids in plugin.asked]
        assert {"a": plugin.asked[0], "b": plugin.asked[1]} == await node.held("p")


async def test_a_container_that_asks_for_nothing_is_not_asked_about(node):
    async with node.plugin() as plugin:
        await node.runs("p", node.container("a", count=0), node.container("b"))
        assert {"a": frozenset(), "b": plugin.asked[0]} == await node.held("p")
        assert 1 == len(plugin.asked)


async def test_a_pod_that_names_its_node_is_not_scheduled_until_the_kubelet_has_admitted_it(node):
    async with node.plugin() as plugin:
        plugin.script.gate = asyncio.Event()
        await node.create("p", node.container("a"), node.container("b"))
        await node.until(lambda: plugin.asked, "nothing is asked")

        await node.stays(lambda: node.conditions("p") == {}, "conditions before the answer")
        plugin.script.gate.set()
        await node.until_phase("p", "Running")
        assert "True" == node.conditions("p")["PodScheduled"]

        plugin.script.refusals.append(REFUSED)
        await node.fails("q")
        assert "PodScheduled" not in node.conditions("q")


async def test_only_the_first_container_response_counts(node):
    async with node.plugin() as plugin:
        plugin.script.responses = lambda ids: [answer(ids), ContainerAllocateResponse({"X": "1"})]
        await node.runs("p")
        (entry,) = [e for e in node.checkpoint().entries if e.resource == node.resource]
        assert answer(*plugin.asked) == ContainerAllocateResponse.parse(entry.response)


async def test_an_answer_without_containers_has_its_own_text_and_leaks_the_ids(node):
    async with node.plugin(count=1) as plugin:
        plugin.script.responses = lambda _ids: []
        status = await node.fails("p")
        assert because("no containers return in allocation response ") == status["message"]

        plugin.script.responses = None
        status = await node.fails("q")
        assert too_few(node, requested=1, available=0) == status["message"]


async def test_a_refusal_reaches_the_pod_word_for_word_and_frees_the_ids(node):
    async with node.plugin(count=1) as plugin:
        plugin.script.refusals.append(REFUSED)
        status = await node.fails("p")
        assert ("UnexpectedAdmissionError", because(GO_TEXT)) == (
            status["reason"],
            status["message"],
        )

        await node.runs("q")
        assert plugin.asked[0] == plugin.asked[1]


def refuse() -> list[ContainerAllocateResponse]:
    raise REFUSED


async def test_after_a_refused_container_the_next_is_not_asked_and_the_first_ones_id_is_free(node):
    async with node.plugin(count=3) as plugin:
        plugin.script.responses = lambda ids: refuse() if len(plugin.asked) == 2 else [answer(ids)]
        await node.fails("p", *(node.container(name) for name in "abc"))
        assert 2 == len(plugin.asked)
        assert await node.held("p") is None

        await node.runs("q", node.container(count=3))


async def test_too_few_free_ids_are_refused_with_both_numbers(node):
    async with node.plugin(count=3) as plugin:
        await node.runs("p", node.container(count=2))

        status = await node.fails("q", node.container(count=2))
        assert too_few(node, requested=2, available=1) == status["message"]
        assert 1 == len(plugin.asked)


@pytest.mark.parametrize("count", [0, 1])
async def test_nothing_healthy_is_refused_even_for_a_count_of_zero(node, count):
    async with node.plugin() as plugin:
        plugin.end_streams()
        await node.until_listed(0)
        status = await node.fails("p", node.container(count=count))
        assert (
            because(
                "no healthy devices present; cannot allocate unhealthy devices " + node.resource
            )
            == status["message"]
        )


async def test_a_resource_that_nobody_ever_registered_is_admitted_without_ids(node):
    await node.runs("p")
    assert {"main": frozenset()} == await node.held("p")


async def test_an_unhealthy_id_is_never_given(node):
    async with node.plugin() as plugin:
        ill = [a_device(f"g{number}", health="Unhealthy") for number in range(3)]
        plugin.publish([*ill, a_device("g3")])
        await node.until_listed(1)
        await node.runs("p")

        status = await node.fails("q")
        assert [{"g3"}] == plugin.asked
        assert "Requested: 1, Available: 0" in status["message"]


async def test_ids_of_an_ended_pod_are_free_for_the_next_allocation(node):
    async with node.plugin(count=1) as plugin:
        await node.runs("p")
        await node.delete("p", grace=1)
        await node.until_gone("p")

        await node.runs("q")
        assert [{"g0"}, {"g0"}] == plugin.asked


async def test_the_second_resources_refusal_voids_the_first_ones_answer(node):
    other = node.resource + "-too"
    async with (
        node.plugin(count=1) as plugin,
        node.plugin(count=1, resource=other, name="o.sock") as second,
    ):
        both = node.container()
        both["resources"]["limits"][other] = "1"
        second.script.refusals.append(REFUSED)
        assert because(GO_TEXT) == (await node.fails("p", both))["message"]
        assert await node.held("p") is None

        await node.runs("q", both)
        assert 1 <= len(plugin.asked) <= 2, "their order is random"


async def test_the_death_of_the_plugin_in_an_allocate_reaches_the_pod(node):
    async with node.plugin() as plugin:
        plugin.hold()
        await node.create("p")
        await node.until(lambda: plugin.asked, "no Allocate")
        await plugin.die()

        status = await node.until_phase("p", "Failed")
        eof = "rpc error: code = Unavailable desc = error reading from server: EOF"
        assert because(eof) == status["message"]


async def test_a_plugin_whose_socket_file_is_gone_is_asked_as_ever(node):
    async with node.plugin() as plugin:
        plugin.remove_socket()
        await node.runs("p")
        assert 1 == len(plugin.asked)


async def test_while_an_allocate_is_held_nothing_else_is_admitted(node):
    async with node.plugin() as plugin:
        plugin.hold()
        await node.create("p")
        await node.until(lambda: plugin.asked, "no Allocate")
        await node.create("plain", node.container(count=0))
        await node.create("q")
        await node.stays(
            lambda: (1, "Pending") == (len(plugin.asked), node.phase("plain")), "one goes on"
        )

        plugin.let_go()
        for name in ("p", "plain", "q"):
            await node.until_phase(name, "Running")


async def test_a_node_selector_that_does_not_match_rejects_after_allocate(node):
    async with node.plugin(count=1) as plugin:
        await node.until_counted(1, 1)
        status = await node.fails("p", nodeSelector={"disk": "none"})
        text = "node(s) didn't match Pod's node affinity/selector"
        assert f"Pod was rejected: Predicate NodeAffinity failed: {text}" == status["message"]
        assert "NodeAffinity" == status["reason"]
        assert [{"g0"}] == plugin.asked

        await node.runs("q")


def is_blocked(path: Path) -> bool:
    """Put a directory that is not empty in the file's place, unless it was written meanwhile."""
    path.unlink(missing_ok=True)
    try:
        (path / "in-the-way").mkdir(parents=True)
    except (FileExistsError, NotADirectoryError):
        return False
    return True


async def test_a_file_that_cannot_be_written_fails_the_admission(node):
    async with node.plugin() as plugin:
        await node.until(lambda: is_blocked(node.checkpoint_path), "the file cannot be replaced")
        try:
            status = await node.fails("p")
        finally:
            (node.checkpoint_path / "in-the-way").rmdir()
            node.checkpoint_path.rmdir()
            await node.come_back(plugin)  # its list has the file written again

        text = (
            'Allocate failed due to failed to write checkpoint file "kubelet_internal_checkpoint"'
        )
        assert "UnexpectedAdmissionError" == status["reason"]
        assert status["message"].startswith(f"Pod was rejected: {text}: ")
