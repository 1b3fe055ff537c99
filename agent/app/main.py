"""The life of the process: settings in, tiers up, signals, tiers down, exit code out."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator, Mapping

import structlog

from agent import __version__
from agent.app.adapters import Adapters, open_adapters
from agent.app.parts import Host, Parts, join
from agent.app.running import Extra, reload_on, tell_systemd, tiers
from agent.app.watching import Watched
from agent.core.changes import NodeEvent
from agent.core.container_edits import container_directory
from agent.core.errors import (
    AgentError,
    DriverMissing,
    PermissionFault,
    Refusal,
    SettingsError,
    StateError,
)
from agent.core.ports import ServiceNotifier
from agent.host.clock import boot_id, machine_id
from agent.host.lockfile import LockFile
from agent.host.systemd import service_notifier
from agent.host.worker import Worker
from agent.kit.heartbeat import Heartbeat
from agent.kit.news import news
from agent.kit.supervisor import BudgetSpent
from agent.kit.tiers import run_tiers
from agent.services.state import recover
from agent.settings.schema import Settings

log = structlog.get_logger(__name__)

STOP_DEADLINE = 10.0
"""Seconds for a clean stop."""

WEB_DELAY = 1.0
"""Seconds after which the web door opens although the kubelet was not reached yet."""

OpenWeb = Callable[..., contextlib.AbstractAsyncContextManager[object]]

OK, NO_DRIVER, BUG, OS_ERROR, NO_PERMISSION, BAD_SETTINGS = 0, 69, 70, 71, 77, 78
"""Exit codes after sysexits; systemd restarts on all but BAD_SETTINGS."""


_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (SettingsError, BAD_SETTINGS),
    (PermissionFault, NO_PERMISSION),
    (StateError, NO_PERMISSION),
    (DriverMissing, NO_DRIVER),
    (AgentError, BUG),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """What the process was started with. `read` reads the settings again. Raises SettingsError."""

    environ: Mapping[str, str]
    read: Callable[[], Settings]


@dataclasses.dataclass(frozen=True, slots=True)
class _Signals:
    """What was asked for from outside."""

    stop: asyncio.Event
    reload: asyncio.Event


async def run_agent(settings: Settings, process: Process) -> int:
    """Run until SIGTERM or SIGINT; return the exit code. A second signal leaves at once."""
    notifier = service_notifier(process.environ, os.getpid())
    log.info("agent.starting", version=__version__, node=settings.node)
    code = OK
    try:
        with _signals() as signals:
            await _run(settings, process, notifier, signals)
    except* (AgentError, OSError) as group:
        code = _refused(group)
    except* BudgetSpent as group:
        code = _given_up(group)
    if code == OK:
        log.info("agent.stopped")
    return code


async def _run(
    settings: Settings, process: Process, notifier: ServiceNotifier, signals: _Signals
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lock = LockFile(settings.paths.run / "lock")
        if not await _ours(lock, settings, notifier, signals.stop):
            return
        stack.callback(lock.release)
        adapters = await stack.enter_async_context(open_adapters(settings, process.environ))
        if settings.driver.exit_without:
            await adapters.driver.scan()
        parts = await _joined(settings, adapters)
        watched = Watched(Heartbeat(), parts=parts, session=adapters.session)

        def reload() -> None:
            _reload(settings, process, parts, notifier)

        extra = Extra(
            heartbeat=watched.heartbeat.run,
            notify=lambda: tell_systemd(notifier, parts),
            reload=lambda: reload_on(signals.reload, reload),
            web=lambda: _serve_web(settings, watched, parts, adapters.worker),
        )
        await run_tiers(tiers(parts, extra, adapters.random), signals.stop, STOP_DEADLINE)
        notifier.stopping()


def _web_door() -> OpenWeb:
    """The late import of aiohttp, for a thread: Register does not wait for it."""
    from agent.app.webdoor import open_web  # noqa: PLC0415 -- late on purpose

    return open_web


async def _serve_web(settings: Settings, watched: Watched, parts: Parts, worker: Worker) -> None:
    """The probes and metrics, once the kubelet was reached or a moment has passed."""
    await news(parts.registration.state, within=WEB_DELAY)
    open_web = await worker.call(_web_door)
    async with open_web(settings, watched):
        await asyncio.Event().wait()


async def _ours(
    lock: LockFile, settings: Settings, notifier: ServiceNotifier, stop: asyncio.Event
) -> bool:
    """Wait until this is the only agent of the host; False when it is to stop before that.

    A standby touches nothing: two agents on one kubelet would each undo what the other knows.
    """
    if lock.try_take():
        return True
    watched = Watched(Heartbeat(), standby=f"another agent runs on this host ({lock.holder()})")
    notifier.ready()
    notifier.status(f"standby: {watched.standby}")
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(_web_door()(settings, watched, unix=False))
        except PermissionFault as error:
            log.info("standby.without_web", reason=str(error))  # the other one has the port
        group = await stack.enter_async_context(asyncio.TaskGroup())
        beating = group.create_task(watched.heartbeat.run())
        taken = group.create_task(lock.take())
        stopped = group.create_task(stop.wait())
        await asyncio.wait((taken, stopped), return_when=asyncio.FIRST_COMPLETED)
        for task in (beating, taken, stopped):
            task.cancel()
    return lock.held and not stop.is_set()


async def _joined(settings: Settings, adapters: Adapters) -> Parts:
    """Read the state, build the services, and make the directories of what is held."""
    boot = boot_id()
    recovered = await recover(adapters.disk, boot_id=boot, machine_id=machine_id())
    parts = join(settings, adapters, Host(boot, recovered))
    if recovered.notice:
        log.warning("state.recovered", notice=recovered.notice)
        event = NodeEvent("StateRecovered", recovered.notice, warning=True)
        parts.following.announcer.say(event)
    for row in parts.state.ledger.value.rows:
        # After a reboot the kubelet uses its records without asking again.
        name = container_directory(row.key.pod_uid, row.key.container)
        with contextlib.suppress(Refusal):
            await adapters.hooks.prepare(name, wipe=False)
    return parts


def _reload(running: Settings, process: Process, parts: Parts, notifier: ServiceNotifier) -> None:
    """Take over what can change while running; refused settings change nothing."""
    notifier.reloading()
    try:
        settings = process.read()
    except SettingsError as error:
        _reject(str(error), parts)
    else:
        changed = parts.facts.sharing.set(settings.sharing)
        changed = parts.facts.edits.set(settings.edits) or changed
        log.info("config.applied", changed=changed)
        same = dataclasses.replace(settings, sharing=running.sharing, edits=running.edits)
        if same != running:
            log.warning("config.needs_restart", hint="some changed settings act at the next start")
    notifier.ready()


def _reject(reason: str, parts: Parts) -> None:
    log.error("config.rejected", err=reason)
    parts.following.announcer.say(NodeEvent("ConfigRejected", reason, warning=True))


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    """TERM and INT ask for a clean stop, a second one leaves at once; HUP asks for a reload."""
    loop = asyncio.get_running_loop()
    signals = _Signals(asyncio.Event(), asyncio.Event())

    def stop(number: signal.Signals) -> None:
        if signals.stop.is_set():
            os._exit(128 + number)  # noqa: TID251 -- the last resort, asked for twice
        log.info("agent.stopping", signal=number.name)
        signals.stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGHUP, signals.reload.set)
    try:
        yield signals
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _refused(group: BaseExceptionGroup[BaseException]) -> int:
    """The exit code for what the world refused, said in one sentence each."""
    code = OS_ERROR
    for error in _leaves(group):
        log.error("agent.failed", err=str(error))
        code = next((exit_code for kind, exit_code in _CODES if isinstance(error, kind)), code)
    return code


def _given_up(group: BaseExceptionGroup[BaseException]) -> int:
    for error in _leaves(group):
        log.error("agent.gave_up", err=str(error), cause=str(error.__cause__))
        if isinstance(error, BudgetSpent) and error.name == "web":
            return OS_ERROR
    return BUG
