"""What ends a registration, and how soon it is back: on virtual time, without sockets."""

import asyncio

from agent.kubelet.register import RegistrationState
from tests.fakes.registration_side import KubeletSide, a_registration

SERVING = RegistrationState(
    registered=True, stream=True, text="registered, the kubelet takes our lists"
)


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_it_registers_at_once_and_says_so():
    side = KubeletSide.started()
    began = now()

    async with a_registration(side) as registration:
        state = await registration.state.until(lambda state: state.stream and state.registered)

        assert SERVING == state
        assert [(began, side.endpoint)] == side.calls
        assert ((("start",), 1),) == registration.registrations.items()


async def test_an_absent_kubelet_is_waited_for_without_a_busy_loop():
    side = KubeletSide()
    async with a_registration(side) as registration:
        await asyncio.sleep(3600)
        assert side.looks < 3600 / 5 + 5
        assert [] == side.calls
        assert "waiting for the kubelet: its socket is not there" == registration.state.value.text

        side.start_kubelet()
        appeared = now()
        await registration.state.until(lambda state: state == SERVING)

        assert appeared == now()
        assert ((("start",), 1),) == registration.registrations.items()


async def test_a_stream_that_ends_is_back_within_a_second():
    side = KubeletSide.started()
    async with a_registration(side) as registration:
        await asyncio.sleep(60)
        lost = now()
        side.streams.set(0)
        await registration.state.until(lambda state: not state.registered)
        await registration.state.until(lambda state: state == SERVING)

        assert 0.05 <= now() - lost <= 0.075
        assert 1 == side.binds
        assert (("stream_lost",), 1) in registration.registrations.items()


async def test_a_stream_that_ends_with_the_kubelet_is_waited_for():
    side = KubeletSide.started()
    async with a_registration(side) as registration:
        await asyncio.sleep(60)
        side.stop_kubelet()
        looked = side.looks
        await asyncio.sleep(600)

        assert 1 == len(side.calls)
        assert side.looks - looked < 600 / 5 + 5
        assert not registration.state.value.registered


async def test_a_kubelet_that_starts_again_is_registered_with_at_once_on_a_new_socket():
    side = KubeletSide.started()
    async with a_registration(side) as registration:
        for restart in range(1, 21):
            await asyncio.sleep(60)
            side.start_kubelet()
            began = now()
            await registration.state.until(lambda state: not state.registered)
            await registration.state.until(lambda state: state == SERVING)

            assert began == now()
            assert restart + 1 == side.binds == len(side.calls)
        assert (("kubelet_restart",), 20) in registration.registrations.items()


async def test_a_socket_of_ours_that_vanishes_is_made_anew():
    side = KubeletSide.started()
    async with a_registration(side) as registration:
        await asyncio.sleep(60)
        began = now()
        side.remove(side.endpoint)
        await registration.state.until(lambda state: not state.registered)
        await registration.state.until(lambda state: state == SERVING)

        assert now() - began < 0.2
        assert 2 == side.binds
        assert (("socket_lost",), 1) in registration.registrations.items()


async def test_a_loss_that_was_not_reported_is_seen_by_looking_again():
    side = KubeletSide.started()
    async with a_registration(side):
        await asyncio.sleep(60)
        side.files.clear()
        await asyncio.sleep(5.5)

        assert 2 == side.binds == len(side.calls)


async def test_a_kubelet_socket_made_anew_under_an_open_stream_is_no_reason_to_register():
    side = KubeletSide.started()
    async with a_registration(side) as registration:
        await asyncio.sleep(60)
        side.touch_kubelet()
        await asyncio.sleep(60)

        assert 1 == len(side.calls)
        assert SERVING == registration.state.value


async def test_other_names_in_the_directory_cause_no_look():
    side = KubeletSide.started()
    async with a_registration(side):
        await asyncio.sleep(1)
        looked = side.looks
        for name in ("kubelet_internal_checkpoint", ".123456", "nvidia-gpu.sock", "DEPRECATION"):
            side.report(name)
        await asyncio.sleep(1)

        assert looked == side.looks


async def test_after_an_overflow_everything_is_looked_at():
    side = KubeletSide.started()
    async with a_registration(side):
        await asyncio.sleep(1)
        side.files.clear()
        side.report("")
        await asyncio.sleep(1)

        assert 2 == side.binds


async def test_two_resources_fail_and_recover_apart():
    well, ill = KubeletSide(), KubeletSide()
    well.start_kubelet()
    async with a_registration(well) as served, a_registration(ill) as waiting:
        await asyncio.sleep(60)
        assert (True, False) == (served.state.value.stream, waiting.state.value.stream)

        ill.start_kubelet()
        await waiting.state.until(lambda state: state == SERVING)

        assert (1, 1) == (len(well.calls), len(ill.calls))


async def test_a_socket_swept_while_the_kubelet_dials_it_is_not_waited_for():
    """A Register that reaches a starting kubelet names a socket that the sweep has just removed."""
    side = KubeletSide.started()
    async with a_registration(side) as registration:
        await registration.state.until(lambda state: state == SERVING)
        side.stop_kubelet()
        await asyncio.sleep(1)
        began = now()
        side.delay = 10.0
        side.touch_kubelet()
        await asyncio.sleep(0.02)
        side.remove(side.endpoint)
        side.delay = 0.0
        await registration.state.until(lambda state: state == SERVING)

        assert now() - began < 0.3
        assert 2 == side.binds


async def test_a_renewal_registers_a_new_socket_under_an_open_stream():
    side = KubeletSide.started()
    async with a_registration(side) as registration:
        await asyncio.sleep(60)
        old, before = side.endpoint, registration.registration_id
        registration.renew()
        await registration.state.until(lambda state: not state.registered)
        await registration.state.until(lambda state: state == SERVING)

        assert old != side.endpoint
        assert 2 == side.binds == len(side.calls)
        assert registration.registration_id not in {None, before}
        assert (("rival_gone",), 1) in registration.registrations.items()


async def test_a_renewal_without_a_stream_changes_nothing():
    side = KubeletSide()
    async with a_registration(side) as registration:
        registration.renew()
        await asyncio.sleep(60)
        side.start_kubelet()
        await registration.state.until(lambda state: state == SERVING)

        assert 1 == side.binds == len(side.calls)


async def test_another_name_is_registered_by_a_new_socket_at_once():
    side = KubeletSide()
    side.start_kubelet()
    async with a_registration(side) as registration:
        await asyncio.sleep(60)
        old, began = side.endpoint, now()
        side.resource.set("example.com/vgpu")
        await registration.state.until(lambda state: not state.registered)
        await registration.state.until(lambda state: state == SERVING)

        assert ("example.com/vgpu", 2) == (side.registered, len(side.calls))
        assert old != side.endpoint
        assert now() - began < 0.3
        assert (("renamed",), 1) in registration.registrations.items()


async def test_a_name_that_comes_while_the_kubelet_is_away_is_the_one_that_is_registered():
    side = KubeletSide()
    async with a_registration(side) as registration:
        await asyncio.sleep(60)
        side.resource.set("example.com/vgpu")
        await asyncio.sleep(60)
        side.start_kubelet()
        await registration.state.until(lambda state: state == SERVING)

        assert ("example.com/vgpu", 1) == (side.registered, len(side.calls))
