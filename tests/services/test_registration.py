"""What ends a registration, how soon it is back, and how often what fails is repeated.

All on virtual time, without sockets.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, cast

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
from tests.services.at_work import at_work, scenarios

RESOURCE = "nvidia.com/gpu"
SERVING = RegistrationState(registered=True, text="registered, the kubelet takes the lists")


class KubeletSide(KubeletDirectory):
    """Plays KubeletDirectory, Register and PluginServer for one resource; time is the loop's.

    `answer` is what Register does: it opens a stream, does nothing, or raises. `calls` holds the
    moment and the endpoint of each Register, `looks` counts the looks at the kubelet's socket.
    """

    def __init__(self) -> None:
        super().__init__(Path("/plugins"))
        self.resource = Cell(RESOURCE)
        self.files: set[str] = set()
        self.present: KubeletEpoch | None = None
        self.streams: Cell[int] = Cell(0)
        self.calls: list[tuple[float, str]] = []
        self.registered = self.served = self._endpoint = ""
        self.looks = self.binds = 0
        self.bind_delay = self.delay = 0.0
        self.answer: Exception | str = "a stream"
        self.bind_failure: Exception | None = None
        self.heard: Callable[[str], None] = lambda _: None
        self._names: asyncio.Queue[str] = asyncio.Queue()

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

    def lose_track(self) -> None:
        """Our socket went, and inotify had no room to tell."""
        self.files.clear()
        self.report("")

    def report(self, name: str) -> None:
        self._names.put_nowait(name)
        self.heard(name)

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
        self.calls.append((now(), endpoint))
        self.registered = resource
        if self.present is None:
            raise KubeletError("kubelet.sock is not there")
        await asyncio.sleep(self.delay)
        if isinstance(self.answer, Exception):
            raise self.answer
        self.streams.set(self.streams.value + bool(self.answer))

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


ANSWERS: dict[str, Exception | str] = {
    "stream": "a stream",
    "nothing": "",
    "broken": KubeletError("kubelet.sock refuses connections"),
    "refused": RegistrationRefused("device plugin already connected: /x/a.sock"),
}


def now() -> float:
    return asyncio.get_running_loop().time()


class RegistrationScene:
    """The kubelet's side and our registration; `waits`: how long each `back` took."""

    def __init__(self) -> None:
        self.side, self.waits = KubeletSide(), list[str]()
        side: Any = self.side
        self.ours = Registration(side.resource, side, side, side.register, Seeded(3))
        side.heard = self.ours.heard

    async def do(self, word: str) -> None:
        """`+5`: 5 s pass. `back`: until the registration was lost and serves again.

        `answer=nothing`, `delay=1`, `bind_delay=1`: how Register and binds are from now on.
        """
        side, (verb, _, what) = self.side, word.partition("=")
        deeds: dict[str, Callable[[], object]] = {
            "start": side.start_kubelet,
            "stop": side.stop_kubelet,
            "touch": side.touch_kubelet,
            "stream-ends": lambda: side.streams.set(0),
            "swept": lambda: side.remove(side.endpoint),
            "overflow": side.lose_track,
            "renew": self.ours.renew,
        }
        if word.startswith("+"):
            await asyncio.sleep(float(word))
        elif word == "back":
            began, state = now(), self.ours.state
            await state.until(lambda one: not one.registered)
            await state.until(lambda one: one == SERVING)
            self.waits.append(f"{now() - began:.2f}")
        elif verb in deeds:
            deeds[verb]()
        elif verb == "bind":
            side.bind_failure = PermissionFault("may not be written") if what == "fails" else None
        elif verb == "answer":
            side.answer = ANSWERS[what]
        elif verb == "name":
            side.resource.set(what)
        else:
            setattr(side, verb, float(what))

    @property
    def told(self) -> str:
        side = self.side
        times = [at for at, _ in side.calls]
        gaps = [f"{later - before:.2f}" for before, later in itertools.pairwise(times)]
        counts = f"calls {len(times)} by {len({name for _, name in side.calls})} names"
        accepted = sum(count for _, count in self.ours.registrations.items())
        parts = [f"{counts}, accepted {accepted}, binds {side.binds}, looks {side.looks}"]
        parts += [f"back in {' '.join(self.waits)}"] * bool(self.waits)
        parts += [f"gaps {' '.join(gaps[:11])}"] * (len(gaps) > 4)
        parts += [f"{side.registered} {side.served}"] * (side.resource.value != RESOURCE)
        return " | ".join([*parts, self.ours.state.value.text])


SCENARIOS = scenarios("registration_scenarios.txt")


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_registration_ends_and_is_back_as_it_is_told(scenario):
    scene = RegistrationScene()
    async with at_work(scene.ours.run):
        for word in scenario.split():
            await scene.do(word)
        assert SCENARIOS[scenario] == scene.told


async def test_each_fresh_socket_that_refuses_is_tried_quickly_for_a_second():
    scene = RegistrationScene()
    async with at_work(scene.ours.run):
        for _ in range(2):
            scene.side.calls.clear()
            for word in ("answer=broken", "start", "+120"):
                await scene.do(word)
            times = [at - scene.side.calls[0][0] for at, _ in scene.side.calls]
            gaps = [later - before for before, later in itertools.pairwise(times)]
            quick = [gap for gap, at in zip(gaps, times, strict=False) if at < 1]
            assert 20 <= len(quick) <= 100
            assert all(0.01 <= gap <= 0.05 + 1e-6 for gap in quick)
            slow = zip((0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0), gaps[len(quick) :], strict=False)
            assert all(base <= gap <= 1.5 * base + 1e-6 for base, gap in slow)
            assert all(10 <= gap <= 15 for gap in gaps[len(quick) + 7 :])


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
