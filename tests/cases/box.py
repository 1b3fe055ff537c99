"""What the cases share: the machine of the random histories, the verdict.

A case is a script with a small instance of a fault that the agent had. It prints what it saw. Its
last line is "VERDICT right" (exit code 0), "VERDICT wrong: why" (1), or "VERDICT none: why" (2): it
could not run, because something that it uses has moved. From the root of the repository:

    .venv/bin/python tests/cases/NAME.py
"""

import asyncio
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import structlog

import tests.machine.agent_life as life
from tests.machine.audit import owner_in
from tests.machine.pods import Shape
from tests.machine.sides import VirtualClock, VirtualLoop
from tests.machine.world import MachineWorld

LIMIT = 300
"""Seconds that a case may take."""


def verdict(*, right: bool, wrong: str) -> NoReturn:
    """End the case: `right` is whether the agent does what it should; `wrong` is what it did."""
    print("VERDICT right" if right else f"VERDICT wrong: {wrong}", flush=True)
    raise SystemExit(0 if right else 1)


def _crashed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    traceback.print_exception(kind, error, trace, file=sys.stdout)
    print(f"VERDICT none: {kind.__name__}: {str(error)[:200]}", flush=True)
    os._exit(2)  # threads of a lab may be left


def _late(*_: object) -> NoReturn:
    raise TimeoutError(f"the case took longer than {LIMIT} s")


sys.excepthook = _crashed
signal.signal(signal.SIGALRM, _late)
signal.alarm(LIMIT)


def quiet() -> None:
    """Let the agent in this process log nothing."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


class CaseWorld(MachineWorld):
    split = 10

    async def run_pod(self, name: str, shape: Shape) -> str:
        """The UID of a new pod, which runs: HAMi's scheduler may need several tries."""
        uid = self.create(name, shape)
        assert uid is not None
        for _ in range(100):
            await self.scheduler.schedule(uid)
            await asyncio.sleep(1)
            if any(one == uid for one, _ in self.running()):
                return uid
        raise AssertionError(f"the scheduler placed no pod {name}")


def machine(play: Callable[[MachineWorld], Coroutine[Any, Any, Any]], seed: int) -> Any:
    """What `play(world)` returns, in virtual time, in models around the agent's own services."""
    quiet()

    async def main() -> Any:
        world = CaseWorld(seed, VirtualClock(asyncio.get_running_loop()), life.start_agent)
        ready = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            living = group.create_task(world.run(ready))
            await ready.wait()
            try:
                return await play(world)
            finally:
                living.cancel()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


def answers_of_another(world: MachineWorld, wrong: list[str]) -> None:
    """Add to `wrong` each answer that the world's kubelet gets with another container's share."""
    answered = world._answered

    def check(response: Any) -> Any:
        asked = world.audit._asking
        if (given := owner_in(response)) != asked:
            wrong.append(f"asked for {asked}, answered {given}")
        return answered(response)

    world._answered = check  # type: ignore[method-assign]


def refusals(text: str) -> list[str]:
    """The ids of refusals in a text."""
    return re.findall(r"HA-\d+", text)
