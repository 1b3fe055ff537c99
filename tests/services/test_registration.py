"""The kubelet's directory, a server of ours in it and a kubelet that answers, all in memory."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Self, cast

import pytest

from agent.errors import KubeletError, PermissionFault, RegistrationRefused
from agent.kit.cell import Cell
from agent.kubelet.register import (
    LOOK_AGAIN,
    SETTLE,
    KubeletDirectory,
    Registration,
    RegistrationState,
    Rivals,
)
from agent.ledger import KubeletEpoch
from tests.fakes.chance import Seeded
from tests.services.at_work import at_work

RESOURCE = "nvidia.com/gpu"


class KubeletSide(KubeletDirectory):
    """Plays KubeletDirectory, Register and PluginServer for one resource; time is the loop's.

    `answer` is what Register does; the usual one opens a stream. `calls` holds the moment and the
    endpoint of each Register, `looks` the number of times that the kubelet's socket was looked at.
    """

    def __init__(self) -> None:
        super().__init__(Path("/plugins"))
        self.resource = Cell(RESOURCE)
        self.files: set[str] = set()
        self.present: KubeletEpoch | None = None
        self.streams: Cell[int] = Cell(0)
        self.calls: list[tuple[float, str]] = []
        self.registered = ""
        self.looks = 0
        self.binds = 0
        self.bind_delay = 0.0
        self.bind_failure: Exception | None = None
        self.served = ""
        self.answer: Callable[[], None] = self.open_stream
        self.delay = 0.0
        self.heard: Callable[[str], None] = lambda _: None
        self._names: asyncio.Queue[str] = asyncio.Queue()
        self._endpoint = ""

    @classmethod
    def started(cls) -> Self:
        """One whose kubelet is there."""
        side = cls()
        side.start_kubelet()
        return side

    # The world

    def start_kubelet(self) -> None:
        """A new process: streams are gone with the old one, all sockets are swept."""
        self.streams.set(0)
        for name in sorted(self.files):
            self.remove(name)
        self.touch_kubelet()

    def touch_kubelet(self) -> None:
        """kubelet.sock is made anew, and nothing else happens."""
        old = self.present or KubeletEpoch(inode=7)
        self.present = KubeletEpoch(old.inode, old.ctime_ns + 1)
        self.report("kubelet.sock")

    def stop_kubelet(self) -> None:
        """Its streams break; its socket file goes too."""
        self.streams.set(0)
        self.present = None
        self.report("kubelet.sock")

    def remove(self, name: str) -> None:
        self.files.discard(name)
        self.report(name)

    def report(self, name: str) -> None:
        self._names.put_nowait(name)
        self.heard(name)

    def lose_track(self) -> None:
        """Our socket went, and inotify had no room to tell."""
        self.files.clear()
        self.report("")

    def open_stream(self) -> None:
        self.streams.set(self.streams.value + 1)

    # KubeletDirectory

    def read(self, name: str) -> KubeletEpoch | None:
        if name != self.kubelet:
            return KubeletEpoch() if name in self.files else None
        self.looks += 1
        return self.present

    async def changes(self) -> AsyncGenerator[str, None]:
        while True:
            yield await self._names.get()

    # Register

    async def register(self, endpoint: str, resource: str) -> None:
        assert endpoint in self.files
        assert 0 == self.streams.value, "Register while a stream is open"
        self.calls.append((asyncio.get_running_loop().time(), endpoint))
        self.registered = resource
        if self.present is None:
            raise KubeletError("kubelet.sock is not there")
        await asyncio.sleep(self.delay)
        self.answer()

    # PluginServer

    @property
    def endpoint(self) -> str:
        return self._endpoint

    async def rebind(self) -> None:
        self.files.discard(self._endpoint)
        self._endpoint = ""
        self.streams.set(0)
        if self.bind_failure is not None:
            raise self.bind_failure
        self.binds += 1
        self.served = self.resource.value
        await asyncio.sleep(self.bind_delay)
        self._endpoint = f"hami-gpu-{self.binds:08x}.sock"
        self.files.add(self._endpoint)


def raising(error: Exception) -> Callable[[], None]:
    """An answer that is an error."""

    def answer() -> None:
        raise error

    return answer


@contextlib.asynccontextmanager
async def a_registration(side: KubeletSide) -> AsyncIterator[Registration]:
    """A registration that runs, until the block is left."""
    registration = Registration(
        side.resource,
        side,  # type: ignore[arg-type]
        side,
        side.register,
        Seeded(3),
    )
    side.heard = registration.heard
    async with asyncio.TaskGroup() as group:
        running = group.create_task(registration.run())
        yield registration
        running.cancel()


def gaps(calls: list[tuple[float, str]]) -> list[float]:
    """Seconds between calls."""
    times = [at for at, _ in calls]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


# What ends a registration, how soon it is back, and how often what fails is repeated.


SERVING = RegistrationState(registered=True, text="registered, the kubelet takes our lists")


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
        assert (((), 1),) == registration.registrations.items()


@pytest.mark.parametrize(
    ("act", "least", "most", "binds"),
    [
        (lambda side, _: side.streams.set(0), 0.05, 0.075, 1),
        (lambda side, _: side.remove(side.endpoint), 0, 0.2, 2),
        (lambda side, _: side.lose_track(), 0, 1, 2),
        (lambda side, _: side.start_kubelet(), 0, 0, 2),
        (lambda _, registration: registration.renew(), 0, 0.3, 2),
        (lambda side, _: side.resource.set("example.com/vgpu"), 0, 0.3, 2),
    ],
    ids=[
        "its stream ends",
        "its socket vanishes",
        "the events overflow",
        "a new kubelet",
        "it is renewed",
        "another name",
    ],
)
async def test_what_ends_a_registration_is_followed_by_the_next_at_once_on_a_new_socket_if_need_be(
    act, least, most, binds
):
    async with registered() as (side, registration):
        began, old, before = now(), side.endpoint, registration.registration_id
        act(side, registration)
        await registered_anew(registration)

        assert least <= now() - began <= most
        assert (binds, 2) == (side.binds, len(side.calls))
        assert (binds == 2) == (old != side.endpoint)
        assert registration.registration_id not in {None, before}
        assert side.resource.value == side.registered
        assert (((), 2),) == registration.registrations.items()


async def test_a_kubelet_socket_made_anew_under_an_open_stream_is_no_reason_to_register():
    async with registered() as (side, registration):
        side.touch_kubelet()
        await asyncio.sleep(60)

        assert 1 == len(side.calls)
        assert SERVING == registration.state.value


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


@pytest.mark.parametrize("during", ["bind_delay", "delay"])
async def test_a_name_that_comes_during_a_bind_or_a_failing_register_gets_a_socket_too(during):
    side = KubeletSide.started()
    side.answer = raising(KubeletError("the connection broke"))
    setattr(side, during, 1.0)
    async with a_registration(side) as registration:
        await asyncio.sleep(0.5)
        side.resource.set("example.com/vgpu")
        await asyncio.sleep(1)
        side.answer = side.open_stream
        await registration.state.until(lambda state: state == SERVING)

        assert "example.com/vgpu" == side.registered == side.served


# Register calls that fail, hang or lead to nothing.

BASE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def backed_off(found: list[float], reply: float = 0.0) -> bool:
    """True when the gaps are the row of delays with up to half of each on top."""
    row = [*BASE, *[10.0] * len(found)]
    return all(
        base <= gap - reply <= 1.5 * base + 1e-6 for base, gap in zip(row, found, strict=False)
    )


async def test_each_fresh_socket_that_refuses_is_tried_quickly_for_a_second():
    side = KubeletSide.started()
    side.answer = raising(KubeletError("kubelet.sock refuses connections"))
    async with a_registration(side):
        await asyncio.sleep(120)
        first = side.calls[:]
        side.start_kubelet()
        await asyncio.sleep(120)

    for calls in (first, side.calls[len(first) :]):
        found = gaps(calls)
        quick = [gap for gap, (at, _) in zip(found, calls, strict=False) if at - calls[0][0] < 1]
        assert 20 <= len(quick) <= 100
        assert all(0.01 <= gap <= 0.05 + 1e-6 for gap in quick)
        assert backed_off(found[len(quick) :])
        assert len(found) - len(quick) > 12


async def test_after_a_refusal_the_next_register_has_a_new_name():
    side = KubeletSide.started()
    refusal = raising(RegistrationRefused("device plugin already connected: /x/a.sock"))
    side.answer = refusal
    async with a_registration(side):
        await asyncio.sleep(5)

    names = [name for _, name in side.calls]
    assert 5 < len(names) == len(set(names))
    assert 1 >= side.binds - len(names)
    assert backed_off(gaps(side.calls))


@pytest.mark.parametrize(
    ("delay", "reply", "texts"),
    [
        (1000, 15.0, ("no answer within 15 s",)),
        (0, 5.0, ("has no stream open", "waiting for the kubelet's stream")),
    ],
    ids=["it hangs", "it is accepted without a stream"],
)
async def test_a_register_that_leads_to_nothing_is_given_up_and_tried_again(delay, reply, texts):
    side = KubeletSide.started()
    side.delay, side.answer = delay, lambda: None
    async with a_registration(side) as registration:
        await asyncio.sleep(100)

        assert backed_off(gaps(side.calls), reply=reply)
        assert 1 == side.binds
        assert any(text in registration.state.value.text for text in texts)


async def test_delays_grow_while_streams_are_short_and_start_over_after_a_stable_one():
    side = KubeletSide.started()
    waits = []
    async with a_registration(side) as registration:
        for life in (1, 1, 1, 1, 11, 1):
            await registration.state.until(lambda state: state == SERVING)
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
        assert SERVING == registration.state.value


async def test_a_new_kubelet_is_a_new_epoch() -> None:
    side = KubeletSide()
    async with at_work(side.run):
        seen: list[KubeletEpoch | None] = [None]
        for act in (side.start_kubelet, side.start_kubelet, side.stop_kubelet):
            act()
            seen.append(await side.epoch.until(lambda epoch: epoch != seen[-1]))

    assert 3 == len(set(seen))
    assert seen[-1] is None


# Another plugin for our resource that comes and goes: told once, and the registration renewed.


class Side:
    """Plays the other plugin's socket (None: there is none) and our registration."""

    def __init__(self, answers: bool | None) -> None:  # noqa: FBT001 -- as `answers()` says it
        self.resource = Cell("nvidia.com/gpu")
        self.is_answering = answers
        self.registration_id: int | None = 0
        self.renewed = 0
        self.said: list[str] = []
        registration = cast("Registration", self)
        self.rivals = Rivals(
            Path("/d"), self.resource, registration, lambda one: self.said.append(one.reason)
        )
        self.rivals.answers = lambda: self.is_answering  # type: ignore[method-assign]

    def renew(self) -> None:
        self.renewed += 1
        self.registration_id = self.renewed

    async def do(self, word: str) -> None:
        """`killed`: its socket stays, and nobody is told. `stop`, `know`: our registration."""
        if word in ("soon", "later"):
            await asyncio.sleep(2 * SETTLE + (LOOK_AGAIN if word == "later" else 0.0))
        elif word in ("stop", "know"):
            self.registration_id = None if word == "stop" else 7
        else:
            states = {"comes": True, "goes": None, "killed": False}
            self.is_answering = states.get(word, self.is_answering)
            if word != "killed":
                name = "kubelet_internal_checkpoint" if word == "other" else "nvidia-gpu.sock"
                self.rivals.heard(name)


@pytest.mark.parametrize(
    ("answers", "steps", "renewed", "told"),
    [
        (None, "comes soon later", 0, 1),
        # When it is gone the registration is renewed, and only once.
        (None, "comes soon goes soon", 1, 1),
        (None, "comes soon other goes soon later later", 1, 1),
        (None, "comes soon killed later", 1, 1),
        # One that came and went between two looks counts.
        (None, "comes goes soon", 1, 0),
        # A stream that ended with it is renewed already; a dead socket disturbs nobody.
        (True, "goes stop later", 0, 0),
        (False, "goes later", 0, 0),
        # A starting kubelet sweeps the socket of a living one, which makes it anew.
        (True, "stop later goes soon", 0, 0),
        (True, "stop later goes soon comes later", 0, 1),
        # A kubelet that knows us again swept it, and that one makes it anew.
        (True, "stop later goes know soon", 0, 0),
        (True, "stop later goes know soon comes later", 0, 1),
        # One that goes after the kubelet's start is missed.
        (True, "know later goes soon", 1, 0),
    ],
)
async def test_another_plugin_is_told_once_and_missed_when_it_goes(answers, steps, renewed, told):
    side = Side(answers)
    async with at_work(side.rivals.run):
        await side.do("soon")
        for word in steps.split():
            await side.do(word)

    assert (renewed, ["PluginConflict"] * told) == (side.renewed, side.said)
