"""Live limits are written into the pod's annotation, for the scheduler to count them."""

import asyncio

import msgspec

from agent.core.reconcile.settlement import SettlementFacts, owed
from agent.core.state.ledger import Effect, Ledger, Row
from agent.services.outbox.service import REFUSED
from tests.builders import G1, NOON, a_pod, a_row, a_share
from tests.services.outbox.owing import GROUPS, Owing, a_placed_pod, owing, settling

ALLOCATED = "hami.io/vgpu-devices-allocated"
POD = a_pod(name="train-0", annotations={ALLOCATED: GROUPS})


def a_live_row(mib: int) -> Row:
    shares = (a_share(memory_mib=1000, core_percent=10),)
    row = a_row(pod_uid=POD.uid, pod=POD.name, shares=shares)
    return msgspec.structs.replace(row, live_limits=(a_share(memory_mib=mib, core_percent=10),))


def found(held: Owing) -> tuple[Effect, ...]:
    return owed(SettlementFacts(held.pods.value, held.state.ledger.value, None, NOON))


async def test_the_pods_annotation_gets_the_limits_and_keeps_all_else():
    async with owing(POD, ledger=Ledger((a_live_row(500),))) as held:
        held.found.set(found(held))
        await asyncio.sleep(1)

        expected = f"{G1},NVIDIA,500,10:;{G1},NVIDIA,2000,20:;"
        assert {ALLOCATED: expected} == held.annotations(POD)
        assert {("annotate-limits", "done"): 1} == held.results
        assert () == held.owed  # an earlier agent could not read it on the disk


async def test_a_later_wish_is_written_too_although_the_watch_is_late():
    async with owing(POD, ledger=Ledger((a_live_row(500),))) as held:
        held.found.set(found(held))
        await asyncio.sleep(1)
        await held.state.commit(lambda ledger: ledger.put(a_live_row(700)))
        held.found.set(found(held))
        await asyncio.sleep(1)

        assert f"{G1},NVIDIA,700,10:;{G1},NVIDIA,2000,20:;" == held.annotations(POD)[ALLOCATED]


async def test_a_pod_that_is_gone_or_says_so_already_needs_none():
    async with owing(POD, ledger=Ledger((a_live_row(500),))) as held:
        effects = found(held)
        await held.state.commit(lambda ledger: ledger.put(a_live_row(1000)))
        held.found.set(effects)
        await asyncio.sleep(1)
        del held.api.pods[POD.key]
        held.see()
        held.found.set(tuple(msgspec.structs.replace(one, value="again") for one in effects))
        await asyncio.sleep(1)

        assert {("annotate-limits", "unchanged"): 1, ("annotate-limits", "dropped"): 1} == dict(
            held.results
        )


async def test_edits_of_the_annotation_cost_rationed_patches():
    count = REFUSED + 20
    async with owing(POD, ledger=Ledger((a_live_row(500),))) as held:
        for number in range(count):
            held.api.put_pod(POD)  # its owner has written the former text again
            held.found.set(())
            await asyncio.sleep(0.001)
            held.found.set(
                tuple(msgspec.structs.replace(one, value=str(number)) for one in found(held))
            )
            await asyncio.sleep(0.001)

        assert {("annotate-limits", "done"): REFUSED} == held.results


async def test_they_wait_behind_no_refused_pod():
    pods = map(a_placed_pod, range(1, REFUSED + 20))
    refused = [settling(pod, phase="failed", groups=()) for pod in pods]
    async with owing(POD, ledger=Ledger((a_live_row(500),))) as held:
        held.found.set((*refused, *found(held)))
        await asyncio.sleep(1)

        assert ("annotate-limits", "done") in held.results
