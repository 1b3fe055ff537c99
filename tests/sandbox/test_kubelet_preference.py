"""When GetPreferredAllocation is called, with what, and what becomes of its answer."""

from contextlib import asynccontextmanager

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.wire.v1beta1 import DevicePluginOptions
from tests.fakes.kubelet_rig import a_container_object, a_pod_object, a_rig
from tests.fakes.plugin import RESOURCE, ScriptedPlugin

OFFERED = DevicePluginOptions(get_preferred_allocation_available=True)


@asynccontextmanager
async def a_rig_that_prefers(root, prefer, *, count=6):
    async with a_rig(root) as rig, ScriptedPlugin(rig.plugins, count=count) as plugin:
        plugin.script.options = OFFERED
        plugin.script.prefer = prefer
        await plugin.register()
        await rig.until_listed(count)
        yield rig, plugin


async def test_the_answer_is_what_allocate_then_names(tmp_path):
    async with a_rig_that_prefers(tmp_path, lambda *_: ["g5", "g2"]) as (rig, plugin):
        await rig.admit(a_pod_object(count=2))

        ((available, must_include, size),) = plugin.preferred
        assert {f"g{n}" for n in range(6)} == set(available)
        assert ([], 2) == (must_include, size)
        assert {"g5", "g2"} == set(plugin.allocated[0])


async def test_it_is_called_even_when_all_that_is_left_is_needed(tmp_path):
    async with a_rig_that_prefers(tmp_path, lambda *_: []) as (rig, plugin):
        await rig.admit(a_pod_object(count=6))

        assert 1 == len(plugin.preferred)


@pytest.mark.parametrize(
    ("preferred", "sure"),
    [
        ([], set()),
        (["g3"], {"g3"}),
        (["foreign", "g3"], {"g3"}),
        (["g0", "g1", "g2", "g3"], set()),
    ],
)
async def test_short_foreign_and_long_answers_are_made_to_fit(tmp_path, preferred, sure):
    async with a_rig_that_prefers(tmp_path, lambda *_: preferred) as (rig, plugin):
        await rig.admit(a_pod_object(count=2))

        (ids,) = plugin.allocated
        assert 2 == len(set(ids))
        assert sure <= set(ids)
        if len(preferred) > 2:
            assert set(ids) <= set(preferred)


async def test_an_error_fails_the_admission_with_the_exact_text(tmp_path):
    def broken(*_: object) -> list[str]:
        raise GRPCError(Status.INTERNAL, "no")

    async with a_rig_that_prefers(tmp_path, broken) as (rig, plugin):
        verdict = await rig.admit(a_pod_object())

        assert (
            "Pod was rejected: Allocate failed due to device plugin GetPreferredAllocation rpc "
            "failed with err: rpc error: code = Internal desc = no, which is unexpected"
        ) == verdict.message
        assert [] == plugin.allocated


async def test_init_containers_give_their_ids_to_the_containers_after_them(tmp_path):
    pod = a_pod_object(
        inits=[a_container_object("i1"), a_container_object("i2")],
        containers=[a_container_object("a1"), a_container_object("a2")],
    )
    async with a_rig_that_prefers(tmp_path, lambda ids, *_: [min(ids)]) as (rig, plugin):
        await rig.admit(pod)

        assert [["g0"], ["g0"], ["g0"], ["g1"]] == plugin.allocated
        assert 2 == len(plugin.preferred), "reused ids are given without asking"


async def test_what_a_sidecar_holds_is_not_given_again(tmp_path):
    pod = a_pod_object(
        inits=[a_container_object("side", sidecar=True), a_container_object("init")],
        containers=[a_container_object("a1"), a_container_object("a2")],
    )
    async with a_rig_that_prefers(tmp_path, lambda ids, *_: [min(ids)]) as (rig, plugin):
        await rig.admit(pod)

        assert [["g0"], ["g1"], ["g1"], ["g2"]] == plugin.allocated


async def test_a_part_that_is_reused_must_be_included(tmp_path):
    pod = a_pod_object(
        inits=[a_container_object("init", count=2), a_container_object("side", sidecar=True)],
        containers=[a_container_object("a1", count=2), a_container_object("a2")],
    )

    def lowest(available, must_include, size):
        rest = sorted(set(available) - set(must_include))
        return [*must_include, *rest][:size]

    async with a_rig_that_prefers(tmp_path, lowest) as (rig, plugin):
        await rig.admit(pod)

        init, side, first, second = (set(ids) for ids in plugin.allocated)
        assert {"g0", "g1"} == init
        assert side < init
        assert (init - side) | {"g2"} == first
        assert {"g3"} == second
        sizes = [(set(must), size) for _, must, size in plugin.preferred]
        assert [(set(), 2), (init - side, 2), (set(), 1)] == sizes


async def test_what_init_containers_leave_stays_with_the_pod_until_it_ends(tmp_path):
    pod = a_pod_object(inits=[a_container_object("i", count=3)], count=1)
    async with a_rig_that_prefers(tmp_path, lambda *_: [], count=4) as (rig, _):
        await rig.admit(pod)

        text = f"unavailable for {RESOURCE}. Requested: 2, Available: 1"
        assert text in (await rig.admit(a_pod_object("u2", count=2))).message
        await rig.soon(rig.kubelet.pod_gone("u1"))
        assert (await rig.admit(a_pod_object("u3", count=4))).admitted
