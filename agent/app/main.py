"""Runs the agent process: standby, start, tiers of tasks, signals, the end and its exit code."""

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Mapping
from functools import partial

import msgspec
import structlog

from agent import __version__
from agent.app.agent import SLOWLY, NodeAgent, StartFacts, open_adapters
from agent.app.web import PORT, SOCKET, WebDoors
from agent.cluster import NodeEvent
from agent.errors import AgentError, PermissionFault, SettingsError, StateError
from agent.host.system import BOOT_ID, MACHINE_ID, HostDisk, LockFile, Systemd, Worker, read_id
from agent.kit.cell import News
from agent.kit.tasks import BudgetSpent, Task, run_tiers
from agent.kit.timing import Lag, await_event, until_tick
from agent.kube.client import Connection, check
from agent.kubelet.register import RegistrationState
from agent.ledger import LastGood
from agent.ports import Disk
from agent.settings.reading import COPY, Sources, SourcesRead, look, stand_in
from agent.settings.schema import Settings
from agent.state import LAST_GOOD_KIND, recover, unseal

log = structlog.get_logger(__name__)

EXPECTED: tuple[type[Exception], ...] = (AgentError, TimeoutError, OSError)
"""Failures of the outside world, logged in one line. Any other exception is a defect."""

STOP_DEADLINE = 10.0
"""Seconds for a clean stop."""

POLL = 0.2
"""Seconds between two tries of a standby agent: it takes over within one second."""

HOOK_DEADLINE = 2.0
"""Seconds to prepare one container's directory at the start."""

OPEN_DEADLINE = 2.0
"""Seconds that a start waits for the API client's import and its credentials."""

ANSWER_DEADLINE = 5.0
"""Seconds that READY waits for the kubelet."""

OS_ERROR = 71
"""The exit code after an OSError. The others are in agent.errors."""


async def run_agent(origin: Sources, start: SourcesRead, settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; return the exit code. A second signal exits at once.

    `origin`: where settings come from. `start`: what was read there, `settings` follow from it.
    """
    notifier = Systemd(origin.environ)
    log.info("agent.starting", version=__version__, node=settings.node, observe=settings.observe)
    for warning in start.taken().warnings:
        log.warning("config.ignored", what=warning)

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

    try:
        async with asyncio.TaskGroup() as group:
            pinging = group.create_task(ping_watchdog(notifier))
            await _run(origin, start, settings, notifier, stop, reload)
            pinging.cancel()
    except* (AgentError, OSError, BudgetSpent) as failures:
        # Several tasks seldom fail at once, and one reason is enough for an end.
        error: BaseException = failures
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        # The log has the traceback of a defect.
        reason = f"{error}: {error.__cause__}" if isinstance(error, BudgetSpent) else str(error)
        log.error("agent.failed", err=reason)  # noqa: TRY400 -- expected: one line
        other = OS_ERROR if isinstance(error, OSError) else AgentError.exit_code
        code = error.exit_code if isinstance(error, AgentError) else other
    else:
        code = 0
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
    environ = origin.environ
    async with contextlib.AsyncExitStack() as stack:
        lock = LockFile(settings.paths.run / "lock")
        if not await _wait_to_be_alone(lock, settings, environ, notifier, stop):
            return
        stack.callback(lock.release)

        state = await stack.enter_async_context(Worker("state"))
        disk = await HostDisk.open(settings.paths.state, state)
        stack.callback(disk.close)
        found = await _recover(disk, start, settings)
        settings = found.settings
        adapters = await stack.enter_async_context(open_adapters(settings, disk, environ))
        if settings.on_no_driver == "exit":
            await adapters.driver.scan()

        look_again = partial(look, origin, adapters.reader)
        connection = Connection(settings.kubeconfig, environment=environ)
        agent = NodeAgent(found, adapters, connection, notifier, reload, look_again)
        stack.callback(agent.witness.close)
        agent.settings.tell_start(found.start)
        if found.recovered.notice:
            log.warning("state.recovered", notice=found.recovered.notice)
            agent.notices.say(NodeEvent("StateRecovered", found.recovered.notice, warning=True))

        # After a reboot the kubelet starts containers from its checkpoint without an Allocate. A
        # directory that fails affects only its container.
        for row in (row for row in agent.state.ledger.value.rows if row.directory):
            try:
                async with asyncio.timeout(HOOK_DEADLINE):
                    await adapters.hooks.prepare(row.directory, wipe=False)
            except (AgentError, TimeoutError) as error:
                reason = str(error) or "no answer"
                log.warning("hooks.not_prepared", ns=row.namespace, pod=row.pod, err=reason)

        if agent.session is not None:
            check(connection)
            stack.push_async_callback(agent.session.close)
            # Before the first answer: its LIST has no time to load the client. The watches report a
            # bad connection.
            with contextlib.suppress(SettingsError, TimeoutError):
                async with Lag().within(OPEN_DEADLINE):
                    await agent.session.open()

        web = WebDoors(settings, agent=agent)
        doors = [
            *agent.doors,
            Task("notify", partial(tell_systemd, notifier, agent)),
            Task("web", partial(web.serve, PORT), SLOWLY),
            Task("web_socket", partial(web.serve, SOCKET), SLOWLY),
        ]

        # The kubelet would use the plugin that registered last, and only one follows HAMi.
        is_there = await adapters.worker.call(agent.rivals.answers)
        if is_there and not (settings.observe or settings.takeover):
            raise SettingsError(
                f"The agent does not start: another plugin serves {agent.facts.resource.value} at"
                f" {agent.rivals.path}: take it off the node (HAMi's: the DaemonSet"
                " hami-device-plugin), or set takeover: true. [PluginConflict]"
            )

        gc.freeze()  # what stays is not collected again: each collection would halt the loop
        tiers = (agent.writers, agent.services, doors)
        await run_tiers(tiers, stop, STOP_DEADLINE, adapters.random, EXPECTED)

        notifier.tell("STOPPING=1")
        if agent.state.is_idle:
            lock.release()  # nothing here writes any more: a standby need not wait for the rest


async def _wait_to_be_alone(
    lock: LockFile,
    settings: Settings,
    environ: Mapping[str, str],
    notifier: Systemd,
    stop: asyncio.Event,
) -> bool:
    """Wait until this is the only agent of the host. False: the process must stop before that.

    Raises SettingsError: it could not take over with this connection to the API server.
    """
    if lock.try_take():
        return True

    if settings.plain is None:
        check(Connection(settings.kubeconfig, environment=environ))
    holder = lock.holder()
    standby = f"another agent runs on this host ({holder})"
    notifier.tell(f"READY=1\nSTATUS=standby: {standby}")

    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(WebDoors(settings, standby).open(PORT))
        except PermissionFault as error:
            log.info("standby.without_web", err=str(error))  # the running agent has the port

        log.info("lock.standby", holder=holder)
        while not lock.try_take():
            # flock gives no notice of a release.
            if await await_event(stop, POLL):
                return False
    log.info("lock.taken")
    return True


async def _recover(disk: Disk, start: SourcesRead, settings: Settings) -> StartFacts:
    """Recover the state. If its rows refuse the settings, the last good ones take their place.

    Raises SettingsError: the rows refuse those too.
    """
    boot, machine = read_id(BOOT_ID), read_id(MACHINE_ID)
    recovered = await recover(disk, boot_id=boot, machine_id=machine)

    stored = None
    try:
        if (content := await disk.read(COPY)) is not None:
            stored = unseal(content, LAST_GOOD_KIND, LastGood)
    except StateError as error:
        log.warning("config.copy_unreadable", file=COPY, err=str(error))

    ledger = recovered.state.ledger
    try:
        start.taken().check_rows(ledger)
    except SettingsError as held:
        last = stand_in(stored, start.taken().sources, ledger)
        if last is None:
            # Only a running agent notices that pods are gone: drained now, rows would stay.
            raise SettingsError(
                held.said, remedy="set it back, then drain the node while the agent runs"
            ) from held
        start = msgspec.structs.replace(start, plan=last, refusal=held)
        settings = last.settings()

    return StartFacts(boot, recovered, start, settings, stored)


# What the service manager hears, and what ends the process.


async def tell_systemd(notifier: Systemd, agent: NodeAgent) -> None:
    """Send READY after the first result at the kubelet, then each state of the registration."""
    registration = agent.registration.state
    if not agent.observes and registration.value == RegistrationState():
        await News(registration).wait(ANSWER_DEADLINE)
    notifier.tell("READY=1")

    async for state in registration.follow():
        text = "observing, nothing is registered" if agent.observes else state.text
        notifier.tell(f"STATUS={' '.join(text.split())}")


async def ping_watchdog(notifier: Systemd) -> None:
    """Ping systemd's watchdog, if it has one, for ever: also while a standby waits."""
    while notifier.watchdog:
        notifier.tell("WATCHDOG=1")
        await asyncio.sleep(until_tick(notifier.watchdog / 3))
