"""What ends a registration, how soon it is back, and how often what fails is repeated.

All on virtual time, without sockets.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from agent.errors import KubeletError, PermissionFault, RegistrationRefused
from agent.kubelet.register import Registration, RegistrationState
from tests.fakes.registration_side import KubeletSide, a_registration, gaps, raising

SERVING = RegistrationState(
    registered=True, stream=True, text="registered, the kubelet takes our lists"
)


def now() -> float:
    return asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def registered(seconds: float = 60) -> AsyncIterator[tuple[KubeletSide, Registration]]:
    """A registration that has served for a while."""
    side = KubeletSide.started()
    async with a_registration(side) as registration:
        await asyncio.sleep(seconds)
        yield side, registration


async def registered_anew(registration: Registration) -> None:
    await registration.state.until(lambda state: not state.registered)
    await registration.state.until(lambda state: state == SERVING)


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
    async with registered() as (side, registration):
        lost = now()
        side.streams.set(0)
        await registered_anew(registration)

        assert 0.05 <= now() - lost <= 0.075
        assert 1 == side.binds
        assert (("stream_lost",), 1) in registration.registrations.items()


async def test_a_stream_that_ends_with_the_kubelet_is_waited_for():
    async with registered() as (side, registration):
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
            await registered_anew(registration)

            assert began == now()
            assert restart + 1 == side.binds == len(side.calls)
        assert (("kubelet_restart",), 20) in registration.registrations.items()


async def test_a_socket_of_ours_that_vanishes_is_made_anew():
    async with registered() as (side, registration):
        began = now()
        side.remove(side.endpoint)
        await registered_anew(registration)

        assert now() - began < 0.2
        assert 2 == side.binds
        assert (("socket_lost",), 1) in registration.registrations.items()


async def test_a_loss_that_was_not_reported_is_seen_by_looking_again():
    async with registered() as (side, _):
        side.files.clear()
        await asyncio.sleep(5.5)

        assert 2 == side.binds == len(side.calls)


async def test_a_kubelet_socket_made_anew_under_an_open_stream_is_no_reason_to_register():
    async with registered() as (side, registration):
        side.touch_kubelet()
        await asyncio.sleep(60)

        assert 1 == len(side.calls)
        assert SERVING == registration.state.value


async def test_other_names_in_the_directory_cause_no_look():
    async with registered(1) as (side, _):
        looked = side.looks
        for name in ("kubelet_internal_checkpoint", ".123456", "nvidia-gpu.sock", "DEPRECATION"):
            side.report(name)
        await asyncio.sleep(1)

        assert looked == side.looks


async def test_after_an_overflow_everything_is_looked_at():
    async with registered(1) as (side, _):
        side.files.clear()
        side.report("")
        await asyncio.sleep(1)

        assert 2 == side.binds


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
    async with registered() as (side, registration):
        old, before = side.endpoint, registration.registration_id
        registration.renew()
        await registered_anew(registration)

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
    async with registered() as (side, registration):
        old, began = side.endpoint, now()
        side.resource.set("example.com/vgpu")
        await registered_anew(registration)

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


# Register calls that fail, hang or lead to nothing.

BASE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def backed_off(found: list[float], reply: float = 0.0) -> bool:
    """True when the gaps are the row of delays with up to half of each on top."""
    row = [*BASE, *[10.0] * len(found)]
    return all(
        base <= gap - reply <= 1.5 * base + 1e-6 for base, gap in zip(row, found, strict=False)
    )


async def test_a_fresh_socket_that_refuses_is_tried_quickly_for_a_second():
    side = KubeletSide.started()
    side.answer = raising(KubeletError("kubelet.sock refuses connections"))
    async with a_registration(side):
        await asyncio.sleep(120)

    found = gaps(side.calls)
    quick = [
        gap for gap, (at, _) in zip(found, side.calls, strict=False) if at - side.calls[0][0] < 1
    ]
    assert 20 <= len(quick) <= 100
    assert all(0.01 <= gap <= 0.05 + 1e-6 for gap in quick)
    assert backed_off(found[len(quick) :])
    assert len(found) - len(quick) > 12


async def test_a_kubelet_that_begins_to_listen_late_is_registered_with_at_once():
    side = KubeletSide.started()
    side.answer = raising(KubeletError("kubelet.sock refuses connections"))
    async with a_registration(side) as registration:
        await asyncio.sleep(0.3)
        side.answer = side.open_stream
        await asyncio.sleep(0.051)

        assert registration.state.value.stream


async def test_a_refusal_that_no_repetition_mends_is_repeated_once_a_minute():
    side = KubeletSide.started()
    side.answer = raising(RegistrationRefused('the ResourceName "x" is invalid'))
    async with a_registration(side) as registration:
        await asyncio.sleep(179)

        assert [60.0, 60.0] == gaps(side.calls)
        assert "is invalid" in registration.state.value.text
        side.answer = side.open_stream
        side.start_kubelet()
        await registration.state.until(lambda state: state.stream)


async def test_already_connected_without_a_stream_needs_a_new_name():
    side = KubeletSide.started()
    refusal = raising(RegistrationRefused("device plugin already connected: /x/a.sock"))
    side.answer = refusal
    async with a_registration(side):
        await asyncio.sleep(5)

    names = [name for _, name in side.calls]
    assert 5 < len(names) == len(set(names))
    assert 1 >= side.binds - len(names)
    assert backed_off(gaps(side.calls))


async def test_already_connected_with_an_open_stream_is_success():
    side = KubeletSide.started()

    def answer() -> None:
        side.open_stream()
        raise RegistrationRefused("device plugin already connected: /x/a.sock")

    side.answer = answer
    async with a_registration(side) as registration:
        await asyncio.sleep(60)

        assert (1, 1) == (len(side.calls), side.binds)
        assert registration.state.value.registered


async def test_a_register_that_hangs_is_given_up_after_15_seconds_and_tried_again():
    side = KubeletSide.started()
    side.delay = 1000
    async with a_registration(side) as registration:
        await asyncio.sleep(100)

        assert backed_off(gaps(side.calls), reply=15.0)
        assert 1 == side.binds
        assert "no answer within 15 s" in registration.state.value.text


async def test_a_kubelet_that_takes_nine_seconds_is_waited_for():
    side = KubeletSide.started()
    side.delay = 9
    async with a_registration(side) as registration:
        await asyncio.sleep(30)

        assert 1 == len(side.calls)
        assert registration.state.value.stream


async def test_a_stream_that_opens_before_the_answer_counts():
    side = KubeletSide.started()
    side.delay = 3
    side.answer = lambda: None
    async with a_registration(side) as registration:
        await asyncio.sleep(1)
        side.open_stream()
        await asyncio.sleep(0.1)
        assert registration.state.value.stream
        await asyncio.sleep(60)

        assert 1 == len(side.calls)
        assert registration.state.value.registered


async def test_an_accepted_register_without_a_stream_is_repeated_after_5_seconds():
    side = KubeletSide.started()
    side.answer = lambda: None
    async with a_registration(side) as registration:
        await asyncio.sleep(60)

        assert backed_off(gaps(side.calls), reply=5.0)
        assert "opened no stream" in registration.state.value.text or (
            "waiting for the kubelet's stream" in registration.state.value.text
        )


@pytest.mark.parametrize("delay", [0.0, 0.5])
async def test_a_stream_that_came_and_went_is_not_waited_for(delay: float):
    side = KubeletSide.started()
    side.delay = delay

    def come_and_go() -> None:
        side.open_stream()
        side.streams.set(0)

    side.answer = come_and_go
    async with a_registration(side):
        await asyncio.sleep(4)

    assert len(side.calls) > 3
    assert backed_off(gaps(side.calls), reply=delay)


async def test_delays_grow_while_streams_are_short_and_start_over_after_a_stable_one():
    side = KubeletSide.started()
    waits = []
    async with a_registration(side) as registration:
        for life in (1, 1, 1, 1, 11, 1):
            await registration.state.until(lambda state: state.registered and state.stream)
            await asyncio.sleep(life)
            lost = now()
            side.streams.set(0)
            await registration.state.until(lambda state: not state.registered)
            await registration.state.until(lambda state: state.registered)
            waits.append(now() - lost)

    assert backed_off(waits[:4])
    assert backed_off(waits[4:])


async def test_a_server_that_cannot_be_bound_is_tried_again_and_never_registered():
    side = KubeletSide.started()
    side.bind_failure = PermissionFault("the directory may not be written")
    async with a_registration(side) as registration:
        await asyncio.sleep(30)
        assert [] == side.calls
        assert "may not be written" in registration.state.value.text

        side.bind_failure = None
        await asyncio.sleep(16)
        assert registration.state.value.stream


async def test_one_line_is_logged_for_each_change(capsys: pytest.CaptureFixture[str]):
    side = KubeletSide.started()
    side.answer = raising(KubeletError("kubelet.sock refuses connections"))
    async with a_registration(side):
        await asyncio.sleep(600)
        side.answer = side.open_stream
        await asyncio.sleep(60)

    lines = capsys.readouterr().out.splitlines()
    assert ["registration.failed", "registration.serving"] == [
        word for line in lines for word in line.split() if word.startswith("registration.")
    ]
