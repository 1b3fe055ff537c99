"""Judges the agent that runs on this node, by its own readiness page, and whether it is alone."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from agent.core.node.findings import (
    OF_ONE_GPU,
    Finding,
    PreflightCheck,
    PreflightVerdict,
    counted,
)
from agent.core.node.preflight import PathFacts, PluginSocket

_LINE: Final = re.compile(r"\[([-+!])\](\S+) (?:ok|(?:failed|degraded): (.*))")
_OURS: Final = re.compile(r".*/hami-(.+)-[0-9a-f]{8}\.sock")
"""The path of an agent's socket. Source: agent/plugin/sockets.py, socket_name."""
_CLUSTER: Final = (PreflightCheck.NODE, PreflightCheck.RIGHTS, PreflightCheck.SETTINGS)
_CORE: Final = (PreflightCheck.LIBRARY, PreflightCheck.PRELOAD)
_CAUSES: Final[Mapping[str, tuple[PreflightCheck, ...]]] = {
    "state": (PreflightCheck.PATHS,),
    "server": (PreflightCheck.KUBELET, PreflightCheck.PATHS),
    "registered": (PreflightCheck.KUBELET, PreflightCheck.DRIVER),
    "stream": (PreflightCheck.KUBELET,),
    "api": _CLUSTER,
    "api_synced": _CLUSTER,
    "report": (*_CLUSTER, PreflightCheck.WRITER),
    "settings": (PreflightCheck.SETTINGS,),
    "inventory": (PreflightCheck.DRIVER,),
    "driver": (PreflightCheck.DRIVER,),
    "gpus": (PreflightCheck.DRIVER,),
    "gpus_answering": (PreflightCheck.DRIVER,),
    "cdi": (PreflightCheck.CDI,),
    "offer": (*_CORE, PreflightCheck.PATHS, PreflightCheck.KUBELET),
}
"""The checks of the doctor that explain a failed check of the agent's readiness, by its name."""
_OF_GPUS: Final = "run `hami-agent status`: it says of each GPU what to do"
_READ: Final = "see /readyz?verbose in the runbook, Start here, and the agent's log"


class AgentAnswer(msgspec.Struct, frozen=True):
    """The answer of `/readyz?verbose` by the agent's socket at `path`.

    `failure`: why there is none; `denied`: this user may not use the socket.
    """

    path: str
    status: int = 0
    text: str = ""
    failure: str = ""
    denied: bool = False


def judge_agent(answer: AgentAnswer) -> Iterator[Finding]:
    """Judge the agent's readiness: one finding for each of its checks that fails."""
    check = PreflightCheck.AGENT
    if answer.denied:
        advice = "run this check as root, or as the agent's user"
        yield Finding.unknown(check, answer.path, answer.failure, advice)
        return
    if answer.failure:
        advice = (
            "start it (systemctl start hami-agent, or look at the DaemonSet's pod of this node), "
            "and give this check the agent's settings (--run-dir)"
        )
        yield Finding.wrong(check, answer.path, f"no agent answers: {answer.failure}", advice)
        return
    lines = [match for match in map(_LINE.fullmatch, answer.text.splitlines()) if match]
    if not lines or answer.status not in {200, 503}:
        said = f"answers {answer.status}, but not as an agent"
        yield Finding.wrong(check, answer.path, said, "give --run-dir of the agent")
        return
    failed = [match for match in lines if match[1] != "+"]
    for sign, name, text in (match.groups() for match in failed):
        is_of_gpus = name in {"gpu_health", "cdi"}
        advice, said = _OF_GPUS if is_of_gpus else _READ, text or "fails"
        finding = Finding.wrong(check, name, said, advice)
        if sign != "-":
            means = OF_ONE_GPU if is_of_gpus else ""
            finding = Finding.note(check, name, said, advice, means)
        yield finding.because_of(*_CAUSES.get(name, ()))
    if not any(match[1] == "-" for match in failed):
        said = f"the agent is ready; {counted(len(lines) - len(failed), 'check')} of it passed"
        yield Finding.ok(check, answer.path, said)


def judge_instances(
    lock: PathFacts, holder: str, waiting: Sequence[int], sockets: Sequence[PluginSocket]
) -> Finding:
    """Judge whether one agent serves here.

    `lock`: the lock file in the run directory; `holder`: what it says of its holder. `waiting`: the
    other processes of agents on this host. `sockets`: all in the kubelet's directory.
    """
    check = PreflightCheck.SECOND
    serving = [one.path for one in sockets if one.alive and _OURS.fullmatch(one.path)]
    if len(serving) > 1:
        return Finding.wrong(
            check,
            ", ".join(serving),
            f"{counted(len(serving), 'agent')} serve the kubelet of this node",
            "stop all but one: the systemd service and the DaemonSet exclude each other",
        )
    if waiting:
        pids = ", ".join(map(str, waiting))
        return Finding.note(
            check,
            lock.path,
            f"more agents run on this host (pid {pids}) than the one that holds the lock",
            "nothing during an update: the next agent waits there. Otherwise stop it, because it "
            "takes over as soon as the other one ends",
            "pods are not affected: only the agent that holds the lock serves",
        )
    # The text stays in the file when its holder has ended.
    said = f"last taken by {holder}" if holder else "names no holder"
    said = f"{said}; {counted(len(serving), 'live socket')} of agents at the kubelet"
    return Finding(check, PreflightVerdict.OK, lock.path, said)
