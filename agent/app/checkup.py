"""`doctor` without `--pre`: checks this node beside the agent that runs there; changes nothing."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from agent.app.cluster_sight import ClusterSight, see_cluster
from agent.app.preflight import (
    bytecode_finding,
    driver_findings,
    library_findings,
    path_findings,
    report_differences,
    witness_finding,
)
from agent.codec.handshake import decode_handshake
from agent.codec.node_report import read_register
from agent.codec.nodelock import decode_node_lock, decode_stamp
from agent.codec.register_colon import is_json_form
from agent.core.cluster.annotations import HANDSHAKE, MUTEX_LOCK, REGISTER
from agent.core.errors import MalformedText
from agent.core.inventory.gpu import Scan
from agent.core.node import preflight, scheduling
from agent.core.node.api_rights import judge_clock, judge_excess
from agent.core.node.check_groups import ALL_GROUPS, FROM_API, MEMBERS, CheckGroup, in_groups
from agent.core.node.config_entries import NamedNode, judge_entries
from agent.core.node.device_access import judge_access
from agent.core.node.findings import Finding, PreflightCheck, traced
from agent.core.node.preflight import PluginSocket
from agent.core.node.running_agent import AgentAnswer, judge_agent, judge_instances
from agent.core.node.scheduling import NodeTraces
from agent.core.ports import Clock
from agent.host.hook.sizes import directory_sizes
from agent.host.inspection import device_nodes, waiting_agents
from agent.host.kube.sight import NodeSight
from agent.host.lockfile import LockFile
from agent.host.surroundings import look_at, plugin_sockets
from agent.settings.sections import Settings

R = TypeVar("R")
LARGEST: Final = 3
"""How many of the container directories that are too large have a line."""


class CheckupRequest(msgspec.Struct, frozen=True):
    """What to check, and what the caller already knows.

    - `agent`: the answer of the agent's readiness page.
    - `settings`: the findings about the settings.
    - `names`: the Nodes that the settings name; `files`: where they do.
    - `reader`: the account may only read, and is not the agent's.
    - `device_files`, `processes`: /dev and /proc.
    """

    agent: AgentAnswer
    groups: frozenset[CheckGroup] = ALL_GROUPS
    settings: tuple[Finding, ...] = ()
    names: tuple[str, ...] = ()
    files: str = "settings"
    reader: bool = False
    device_files: Path = Path("/dev")
    processes: Path = Path("/proc")


async def examine_running(
    settings: Settings, environ: Mapping[str, str], clock: Clock, request: CheckupRequest
) -> tuple[Finding, ...]:
    """All findings of these groups, in their order."""
    checkup = _Checkup(settings, clock, request)
    groups = request.groups
    if settings.plain is None and groups & (FROM_API | {CheckGroup.CONFIG}):
        others = [name for name in request.names if name != settings.node]
        reader = request.reader
        checkup.cluster = await see_cluster(settings, environ, clock, others, reader=reader)
    findings = [*request.settings, *checkup.agent(), *path_findings(settings)]
    findings += [*checkup.directories(), *checkup.config()]
    if groups & {CheckGroup.DRIVER, CheckGroup.SCHEDULER}:
        checkup.scan, driver = await driver_findings(settings, environ)
        findings += [*driver, *checkup.access()]
    if CheckGroup.LIBRARY in groups:
        findings += await library_findings(settings)
    if CheckGroup.KUBELET in groups:
        findings.append(await witness_finding(settings, serving=not request.agent.failure))
    findings += [*checkup.kubelet(), *checkup.api(), *checkup.scheduler()]
    findings += checkup.unseen(findings)
    return in_groups(traced(findings), groups)


class _Checkup(msgspec.Struct, eq=False):
    """One run of the checks. `cluster`, `scan`: what was seen; None: nothing."""

    settings: Settings
    clock: Clock
    request: CheckupRequest
    cluster: ClusterSight | None = None
    scan: Scan | None = None

    @property
    def sockets(self) -> tuple[PluginSocket, ...]:
        paths = self.settings.paths
        return plugin_sockets(paths.plugins, paths.kubelet_socket.name)

    @property
    def node(self) -> NodeSight | None:
        return self.cluster.node if self.cluster else None

    def agent(self) -> Iterator[Finding]:
        paths = self.settings.paths
        lock = paths.run / "lock"
        holder = LockFile(lock).holder().strip()
        waiting = waiting_agents(paths.run, holder, self.request.processes)
        yield from judge_agent(self.request.agent)
        yield judge_instances(look_at(lock), holder, waiting, self.sockets)
        yield bytecode_finding()

    def directories(self) -> Iterator[Finding]:
        hook = self.settings.paths.hook
        with contextlib.suppress(OSError):  # the lines above say what is wrong with the directories
            sizes = directory_sizes(hook).items()
            large = [(name, one) for name, one in sizes if one.is_beyond or one.closed]
            for name, size in sorted(large, key=lambda one: -one[1].size)[:LARGEST]:
                path = f"{hook}/vgpu/containers/{name}"
                yield preflight.judge_size(path, size.size, size.entries)

    def config(self) -> Iterator[Finding]:
        names = dict.fromkeys(self.request.names, NamedNode.UNSEEN)
        if self.cluster is not None:
            names |= self.cluster.names
        if self.settings.node in names:
            names[self.settings.node] = NamedNode.THERE
        yield from judge_entries(self.settings.node, names, self.request.files)

    def access(self) -> Iterator[Finding]:
        if self.settings.driver.simulate is None:
            gpus = None if self.scan is None else len(self.scan.gpus) + len(self.scan.faults)
            yield from judge_access(device_nodes(self.request.device_files), gpus)

    def kubelet(self) -> Iterator[Finding]:
        paths = self.settings.paths
        place = look_at(paths.plugins)
        yield preflight.judge_kubelet(place, look_at(paths.kubelet_socket))
        alive = [one for one in self.sockets if one.alive]
        # The register annotation is the agent's own here, and no sign of HAMi's plugin.
        answer = self.cluster.answer if self.cluster else None
        answer = answer and msgspec.structs.replace(answer, annotations={})
        yield from preflight.judge_plugins(place, alive, answer, takeover=self.settings.takeover)
        if self.node is not None:
            report, now = self._report(self.node.traces), self.clock.now()
            if finding := scheduling.judge_offer(self.settings.node, self.node.offer, report, now):
                yield finding

    def api(self) -> Iterator[Finding]:
        if self.cluster is None:
            return
        answer = self.cluster.answer
        if answer.failure:
            advice = answer.remedy or "repair the connection, and run this check again"
            yield Finding.unknown(PreflightCheck.NODE, answer.server, answer.failure, advice)
            return
        yield from preflight.judge_cluster(self.settings.node, answer)
        if self.cluster.excess is not None:
            yield judge_excess(answer.server, self.cluster.excess)
        if self.node is not None:
            yield judge_clock(answer.server, self.node.skew)

    def scheduler(self) -> Iterator[Finding]:
        if self.node is None:
            return
        traces, name, now = self.node.traces, self.settings.node, self.clock.now()
        profile, report = self.settings.report.profile, self._report(self.node.traces)
        yield scheduling.judge_present_report(name, report, profile)
        text = traces.annotations.get(HANDSHAKE, "")
        seen = scheduling.HandshakeSeen(text, text.partition(" ")[0][:32])
        if (said := _decoded(decode_handshake, text)) is not None:
            stamp = said.stamp if said.stamp is not None and said.stamp.tzinfo else None
            seen = scheduling.HandshakeSeen(text, said.word.value, stamp)
        yield scheduling.judge_handshake(name, seen, report, profile, now)
        yield scheduling.judge_writer(traces, report)
        lock = traces.annotations.get(MUTEX_LOCK)
        yield scheduling.judge_lock(name, lock, _decoded(decode_node_lock, lock), now)
        stale = [one.path for one in self.sockets if one.theirs and not one.alive]
        scores = self.settings.report.topology_score
        yield from scheduling.judge_leftovers(traces, stale, stamps=profile.stamps, scores=scores)

    def unseen(self, findings: Sequence[Finding]) -> Iterator[Finding]:
        """One finding for each group of which checks were not made."""
        if self.cluster is None:
            return
        made = {one.point for one in findings}
        rest = {PreflightCheck.MONITOR}  # there is nothing to say without HAMi's plugin
        for group in FROM_API:
            missing = [check for check in MEMBERS[group] if check not in made | rest]
            if missing:
                names = ", ".join(check.value for check in missing)
                said = f"not checked: {names}"
                advice = "repair what is said of the API server, and run this check again"
                server = self.cluster.answer.server
                yield Finding.unknown(missing[0], server, said, advice)

    def _report(self, traces: NodeTraces) -> scheduling.ReportSeen:
        text = traces.annotations.get(REGISTER)
        if text is None:
            return scheduling.ReportSeen()
        gpus = read_register(text)
        differences: tuple[str, ...] = ()
        if self.scan is not None and gpus:
            differences = report_differences(self.settings, self.scan, traces.annotations)
        return scheduling.ReportSeen(
            is_there=True,
            gpus=len(gpus),
            healthy=sum(gpu.split_count for gpu in gpus if gpu.healthy),
            is_json=is_json_form(text),
            differences=differences,
            written=_decoded(decode_stamp, traces.last_written)
            if REGISTER in traces.written
            else None,
        )


def _decoded(decode: Callable[[str], R], text: str | None) -> R | None:
    """What the text says; None if there is none, or it cannot be read."""
    try:
        return None if text is None else decode(text)
    except MalformedText:
        return None
