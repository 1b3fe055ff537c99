"""Runs the agent process: start in tiers, signals, stop in tiers, exit code."""

import asyncio
import contextlib
import datetime as dt
import gc
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import structlog

from agent import __version__
from agent.app.adapters import open_adapters, open_disk
from agent.app.agent import WEB, NodeAgent, StartFacts
from agent.app.web import PORT, SOCKET, WebDoors
from agent.cluster import NodeEvent
from agent.errors import AgentError, DirectoryLost, PermissionFault, SettingsError, StateError
from agent.host.node import is_read_only
from agent.host.process import (
    BOOT_ID,
    MACHINE_ID,
    LockFile,
    SystemClock,
    Systemd,
    read_id,
    service_notifier,
)
from agent.kit.cell import Cell, News
from agent.kit.tasks import BudgetSpent, Task, run_tiers, show_thread_name
from agent.kit.timing import Lag, until_tick
from agent.kube.connection import Connection, check
from agent.kubelet.register import RegistrationState, Rival
from agent.ledger import container_directory
from agent.ports import Disk
from agent.settings.reading import COPY, SourcesRead, look, stand_in
from agent.settings.schema import Settings
from agent.settings.sources import NodeFacts, Sources
from agent.state import decode_last_good, recover

log = structlog.get_logger(__name__)

EXPECTED: tuple[type[Exception], ...] = (AgentError, TimeoutError, OSError)
"""Failures of the outside world, logged in one line. Any other exception is a defect."""

STOP_DEADLINE = 10.0
"""Seconds for a clean stop."""

HOOK_DEADLINE = 2.0
"""Seconds to prepare one container's directory at the start."""

OPEN_DEADLINE = 2.0
"""Seconds that a start waits for the API client's import and its credentials."""

STATUS_PERIOD = 10.0
"""Seconds after which the status line is computed again without news."""

ANSWER_DEADLINE = 5.0
"""Seconds that READY waits for the kubelet. A silent kubelet or driver is no failed start."""

LAST_DEADLINE = 10.0
"""Seconds to post the last Events when the settings end the process."""

OS_ERROR = 71
"""The exit code after a failure that the agent does not know. The others are in agent.errors."""


async def run_agent(origin: Sources, start: SourcesRead, settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; return the exit code. A second signal exits at once.

    `origin`: where settings come from. `start`: what was read there, and `settings` follow from it.
    """
    notifier = service_notifier(origin.environ, os.getpid())
    log.info("agent.starting", version=__version__, node=settings.node, observe=settings.observe)
    for warning in start.taken().warnings:
        log.warning("config.ignored", what=warning)

    pool = ThreadPoolExecutor(initializer=show_thread_name, initargs=("asyncio",))
    asyncio.get_running_loop().set_default_executor(pool)

    code = 0
    try:
        await _run(origin, start, settings, notifier, *_signals())
    except* (AgentError, OSError) as group:
        for error in _leaves(group):
            log.error("agent.failed", err=str(error))  # noqa: TRY400 -- expected: one line
            code = error.exit_code if isinstance(error, AgentError) else code or OS_ERROR
    except* BudgetSpent as group:
        code = AgentError.exit_code
        for error in _leaves(group):
            cause = str(error.__cause__)  # its traceback is in the log already
            log.error("agent.gave_up", err=str(error), cause=cause)  # noqa: TRY400

    if code == 0:
        log.info("agent.stopped")
    return code


async def _run(
    origin: Sources,
    start: SourcesRead,
    settings: Settings,
    notifier: Systemd,
    stop: asyncio.Event,
    reload: asyncio.Event,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(watchdog_pinged(notifier))
        lock = LockFile(settings.paths.run / "lock")
        if not await _wait_to_be_alone(lock, settings, origin.environ, notifier, stop):
            return
        stack.callback(lock.release)

        disk = await stack.enter_async_context(open_disk(settings))
        found = await _recover(disk, start, settings)
        settings = found.settings
        try:
            connection = _connection(settings, origin.environ)
        except SettingsError as error:
            if found.start.refusal is None:
                raise
            raise SettingsError(f"{error}; {found.start.refusal}") from error

        opening = open_adapters(settings, disk, origin.environ)
        adapters = await stack.enter_async_context(opening)
        if settings.driver.on_no_driver == "exit":
            await adapters.driver.scan()

        look_again = partial(look, origin, adapters.reader)
        agent = NodeAgent(found, adapters, connection, notifier, stop, reload, look_again)
        stack.callback(agent.witness.close)
        agent.settings.tell_start(found.start)
        if found.recovered.notice:
            log.warning("state.recovered", notice=found.recovered.notice)
            agent.notices.say(NodeEvent("StateRecovered", found.recovered.notice, warning=True))

        await _prepare(agent)
        if agent.session is not None:
            stack.push_async_callback(agent.session.close)
            # Before the first answer: its LIST has no time to load the client. The watches report a
            # bad connection and try again.
            with contextlib.suppress(SettingsError, TimeoutError):
                async with Lag().within(OPEN_DEADLINE):
                    await agent.session.open()
        await _refuse_rival(agent)

        tiers = (agent.writers, agent.services, _doors(agent, notifier))
        gc.freeze()  # what stays is not collected again: each collection would halt the loop
        await run_tiers(tiers, stop, STOP_DEADLINE, adapters.random, EXPECTED)
        await _end(agent, lock, notifier)


def _doors(agent: NodeAgent, notifier: Systemd) -> list[Task]:
    settings = agent.found.settings
    web = WebDoors(settings, agent=agent)
    doors = [
        *agent.doors,
        Task("notify", lambda: tell_systemd(notifier, agent)),
        Task("web", lambda: web.serve(PORT), WEB),
        Task("web_socket", lambda: web.serve(SOCKET), WEB),
    ]

    if not agent.observes:
        mounts = partial(watch_mounts, agent.registration.state, settings.paths.plugins)
        doors.append(Task("mounts", mounts, None))  # this process never sees the new mounts
    return doors


async def _end(agent: NodeAgent, lock: LockFile, notifier: Systemd) -> None:
    """Leave the node, after all tasks have ended. Raises SettingsError if the settings ended it."""
    notifier.stopping()
    if agent.state.is_idle:
        lock.release()  # nothing here writes any more: a standby need not wait for the driver

    refusal = agent.settings.refusal
    if refusal is not None and agent.facts.inventory.value.generation == 0:
        await _post_last(agent)
        raise refusal


def _connection(settings: Settings, environ: Mapping[str, str]) -> Connection:
    """The connection to the API server, which plain mode does not use.

    Raises SettingsError: it cannot be used.
    """
    connection = Connection(
        kubeconfig=Path(settings.kubeconfig) if settings.kubeconfig else None,
        environment=environ,
    )
    if settings.plain is None:
        check(connection)

    return connection


async def _wait_to_be_alone(
    lock: LockFile,
    settings: Settings,
    environ: Mapping[str, str],
    notifier: Systemd,
    stop: asyncio.Event,
) -> bool:
    """Wait until this is the only agent of the host. False: the process must stop before that.

    A standby changes nothing: two agents at one kubelet would undo each other's work. Raises
    SettingsError: it could not take over with this connection to the API server.
    """
    if lock.try_take():
        return True

    _connection(settings, environ)
    standby = f"another agent runs on this host ({lock.holder()})"
    notifier.ready()
    notifier.status(f"standby: {standby}")

    async with contextlib.AsyncExitStack() as stack:
        try:
            web = WebDoors(settings, standby)
            await stack.enter_async_context(web.open(PORT))
        except PermissionFault as error:
            log.info("standby.without_web", err=str(error))  # the running agent has the port
        return await lock.take(stop)


async def _refuse_rival(agent: NodeAgent) -> None:
    """Raise SettingsError if another plugin serves our resource.

    The kubelet would use the one that registered last, and only one follows the scheduler.
    """
    settings = agent.found.settings
    if settings.observe or settings.takeover:
        return

    resource = settings.sharing.resource
    rival = Rival(settings.paths.plugins, Cell(resource))
    if not await agent.adapters.worker.call(rival.answers):
        return

    text = (
        f"The agent does not start: another plugin serves {resource} at {rival.path}: take it off "
        "the node (HAMi's: the DaemonSet hami-device-plugin), or set takeover: true."
    )
    agent.notices.say(NodeEvent("PluginConflict", text, warning=True))
    await _post_last(agent)
    raise SettingsError(text)


async def _post_last(agent: NodeAgent) -> None:
    """Post the waiting Events when the settings end the process.

    Best effort: the log also has the reason.
    """
    if agent.observes or agent.events is None:
        return

    try:
        async with asyncio.timeout(LAST_DEADLINE):
            for event in agent.notices.waiting:
                await agent.events.post(event)
    except (AgentError, TimeoutError, OSError) as error:
        log.info("event.not_posted", err=str(error) or "no answer")


async def _recover(disk: Disk, start: SourcesRead, settings: Settings) -> StartFacts:
    """Recover the state. If its rows refuse the settings, the last good ones take their place.

    Raises SettingsError: the rows refuse the settings, and the last good ones too.
    """
    boot = read_id(BOOT_ID)
    running = dt.timedelta(seconds=asyncio.get_running_loop().time())  # since the boot
    booted_at = SystemClock().now() - running
    machine = read_id(MACHINE_ID)
    recovered = await recover(disk, boot_id=boot, machine_id=machine, booted_at=booted_at)

    stored = None
    try:
        content = await disk.read(COPY)
        stored = None if content is None else decode_last_good(content)
    except StateError as error:
        log.warning("config.copy_unreadable", file=COPY, err=str(error))

    ledger = recovered.state.ledger
    held = start.taken().undrained(ledger)
    if held is not None:
        last = stand_in(stored, start.taken().sources, NodeFacts(), ledger)
        if last is None:
            # Only a running agent notices that pods are gone: drained now, rows would stay.
            raise SettingsError(
                held.said, remedy="set it back, then drain the node while the agent runs"
            )
        start = msgspec.structs.replace(start, plan=last, refusal=held)
        settings = last.settings(NodeFacts())

    return StartFacts(boot, recovered, start, settings, stored)


async def _prepare(agent: NodeAgent) -> None:
    """Prepare the directories of the ledger's containers.

    After a reboot the kubelet starts them from its checkpoint without an Allocate. A directory
    that fails affects only its container.
    """
    for row in (row for row in agent.state.ledger.value.rows if row.has_directory):
        try:
            name = container_directory(row.key.pod_uid, row.key.container)
            async with asyncio.timeout(HOOK_DEADLINE):
                await agent.adapters.hooks.prepare(name, wipe=False)
        except (AgentError, TimeoutError) as error:
            log.warning(
                "hooks.not_prepared", ns=row.namespace, pod=row.pod, err=str(error) or "no answer"
            )


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Handle TERM and INT (stop; a second one exits at once) and HUP (reload): their events."""
    loop = asyncio.get_running_loop()
    stop, reload = asyncio.Event(), asyncio.Event()

    def end(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)  # noqa: TID251 -- the second signal exits at once

        log.info("agent.stopping", signal=number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    return stop, reload


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


# What the service manager hears, and what ends the process.


async def kubelet_answered(state: Cell[RegistrationState]) -> None:
    """Wait for the first result at the kubelet, ANSWER_DEADLINE seconds at most.

    Then the kubelet registered or refused the plugin's socket, or there is no kubelet.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_DEADLINE):
            await state.until(lambda now: now != RegistrationState())


async def watch_mounts(
    state: Cell[RegistrationState],
    directory: Path,
    read_only: Callable[[Path], bool] = is_read_only,
) -> NoReturn:
    """Watch the kubelet's directory. Raises DirectoryLost: this process can never write there.

    A sandbox that mounts a directory for writing loses the mount when the directory is removed. A
    new directory in its place is read-only to this process for ever.
    """
    handle: int | None = None
    while True:
        with contextlib.suppress(OSError):
            is_closed = read_only(directory)
            if handle is None and not is_closed:
                handle = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            # On a file system that turned read-only, the directory was not removed.
            if is_closed and handle is not None and os.fstat(handle).st_nlink == 0:
                raise DirectoryLost(
                    f"{directory} was created again, and this process cannot write there: restart "
                    "the agent"
                )
        await News(state).wait(until_tick(STATUS_PERIOD))


async def tell_systemd(notifier: Systemd, agent: NodeAgent) -> None:
    """Send READY after the first result at the kubelet, then each new status line."""
    if not agent.observes:
        await kubelet_answered(agent.registration.state)
    notifier.ready()

    text = ""
    while True:
        state, listed = agent.registration.state.value, agent.facts.slices.value
        slices = sum(len(group.ids) for group in listed.groups if group.healthy)
        now = f"{slices} slices on offer; {state.text}"
        if agent.observes:
            now = f"observing, nothing is registered; {slices} slices would be on offer"

        if now != text:
            text = now
            notifier.status(text)

        changed = News(agent.registration.state, agent.facts.slices)
        await changed.wait(until_tick(STATUS_PERIOD))


@contextlib.asynccontextmanager
async def watchdog_pinged(notifier: Systemd) -> AsyncIterator[None]:
    """Ping systemd's watchdog while the block runs, also while a standby waits."""
    if notifier.watchdog is None:
        yield
        return

    period = notifier.watchdog.total_seconds() / 3

    async def beat() -> None:
        while True:
            notifier.alive()
            await asyncio.sleep(until_tick(period))

    async with asyncio.TaskGroup() as group:
        beating = group.create_task(beat())
        yield
        beating.cancel()
