"""Acts on simulated GPUs, and runs the agent against simulated peers."""

import argparse
import asyncio
import dataclasses
import json
import math
import shlex
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent.cli.main import TABLE, Exit, Subparsers, Unreachable, add_output, fail, typed
from agent.cli.output import UNFOLDED, Paint, answer, painter, table, wrapped
from agent.errors import AgentError, DriverError, cut
from agent.kit.logs import configure
from agent.kit.units import Column, counted
from agent.sandbox import hardware_talk as talk
from agent.sandbox.apiserver import PREFIX
from agent.sandbox.hardware import MOST_GPUS, PROFILES, described
from agent.sandbox.lab import cluster as lab
from agent.sandbox.scenario import default, stage
from agent.setting import duration, whole

# Renders the output of `hami-agent sandbox`. Pure.

LOG_LINES: Final = 30
"""The agent's last lines that are shown when a claim was not true."""

ID_WIDTH: Final = 20

MEASURES: Final[Mapping[str, str]] = {
    "exec_to_registered": "exec of the agent → registered",
    "xid_to_kubelet": "XID 79 → list at the kubelet",
    "kubelet_socket_to_allocatable": "new kubelet's socket → allocatable back",
    "kill_to_serving": "SIGKILL → the next agent serves",
    "burst_to_decided": "burst with a SIGKILL in it → every pod decided",
    "sigterm_to_exit": "SIGTERM → exit",
}
"""The measured times, in the words of the summary."""

_WORDS: Final = {True: ("ok", "green"), False: ("FAILED", "red"), None: ("", "faint")}
"""The word and the colour of a claim by whether it is true; None: of what claims nothing."""


def moment_lines(moment: stage.Moment, width: int, paint: Paint) -> Iterator[str]:
    """Render an entry of the timeline; its detail follows on the line if it fits, else below."""
    word, colour = _WORDS[moment.ok]
    head = f"t+{moment.elapsed:6.2f}s  {word:<6}  "
    room, detail = width - len(head), " ".join(moment.detail.split())
    whole = f"{moment.text}: {detail}" if detail else moment.text
    parts = [whole] if len(whole) <= room else [moment.text, detail]
    first, *rest = [line for part in parts for line in textwrap.wrap(part, room)]
    yield paint(head, colour) + first
    yield from (f"{' ' * len(head)}{line}" for line in rest)


def summary_lines(
    claims: Sequence[stage.ScenarioClaim], measured: Mapping[str, float], width: int
) -> Iterator[str]:
    """Render the measured times, the claims that failed, and how many were true."""
    yield ""
    times = {MEASURES[name]: seconds for name, seconds in measured.items() if name in MEASURES}
    if times:
        rows = [(label, f"{1000 * seconds:.0f} ms") for label, seconds in times.items()]
        yield from (*table((Column("MEASURED", least=6), Column("TIME")), rows, width), "")

    failed = [claim for claim in claims if not claim.ok and claim.measured != stage.NOT_REACHED]
    for claim in failed:
        head = f"{cut(claim.id, ID_WIDTH):<{ID_WIDTH}}  "
        yield from wrapped(claim.measured or "-", width, head, " " * len(head))

    true = sum(claim.ok for claim in claims)
    unchecked = len(claims) - true - len(failed)
    words = f"{true} of {len(claims)} claims checked and true"
    if failed:
        words += f", {len(failed)} not"
    words += f", {unchecked} not checked" if unchecked else ""
    yield from wrapped(words, width)


def invitation(cluster: lab.SandboxCluster) -> str:
    """Render what to type in another terminal. Commands are never wrapped."""
    places = cluster.places
    root, web, log = places.root, cluster.web_address or "not up yet", places.log
    gpus, api = f"--socket {places.hardware_socket}", f"--socket {root}/run/api.sock"
    gpu = cluster.hardware.states[-1].gpu.index
    people, pod = root / "kubectl.config", root / "pod.json"
    people.write_text(lab.kubeconfig(f"{cluster.api.url}{PREFIX}{cluster.admin_token}", ""))
    pod.write_text(json.dumps(stage.plain("mine").pod(), indent=2))
    called = sys.argv[0]
    program = called if Path(called).name == "hami-agent" else f"{sys.executable} -m agent"

    return textwrap.dedent(f"""
        The sandbox stays up until ctrl-c, which removes everything.
          web        {web}
          unix       {root}/run/api.sock
          agent log  {log}
          API model  {cluster.api.url}
          directory  {root}

        Try in another terminal:
          tail -n +1 -f {log}
          curl '{web}/readyz?verbose'
          {program} status {api}
          {program} status --by pod {api}
          {program} doctor {shlex.join(cluster.command()[1:])}
          {program} bundle {api}
          {program} simulate list {gpus}
          {program} simulate xid 79 --gpu {gpu} {gpus}
          {program} simulate restore --gpu {gpu} {gpus}
            (a GPU that was reset is served again after its cool-down: health.quietPeriod)
          kill -9 {cluster.agent.pid}
          export KUBECONFIG={people}
          {program} explain demo/too-big
          {program} status --node sandbox
          {program} cordon 0 --node sandbox
          kubectl create --validate=false -f {pod}
          kubectl get node sandbox -o yaml
        """)


TERMINATED: Final = 128 + signal.SIGTERM
"""The exit code after SIGTERM, as shells have it."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verbs `sandbox` and `simulate`."""
    _add_simulate(subparsers)
    parser = subparsers.add_parser(
        "sandbox",
        description=_run.__doc__,
        epilog="example: hami-agent sandbox --gpus 8 --profile h100 --interactive",
    )
    parser.add_argument("--gpus", type=int, default=8, metavar="COUNT", help="GPUs (default 8)")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="h100", help="their model")
    told, count = "slices per GPU (default 10)", typed(whole(1, 1000), "a number from 1 to 1000")
    parser.add_argument("--split-count", type=count, default=10, metavar="COUNT", help=told)
    add_output(parser)
    up = "place a few pods, then stay up until ctrl-c"
    parser.add_argument("--interactive", action="store_true", help=up)
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory")
    more = "one more flag for the agent, such as --agent-flag=--log-level=debug"
    parser.add_argument("--agent-flag", action="append", default=[], metavar="FLAG", help=more)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the verb; return the exit code.

    `sandbox`: 0, 1 a claim is not true, 2 wrong usage. `simulate`: 0 done, 1 refused, 2 wrong
    usage, 3 no answer at the socket, 4 no such GPU.
    """
    if args.verb == "simulate":
        return _simulate(args)
    if problem := _problem(args):
        return fail("sandbox", problem, Exit.USAGE)

    configure("warning", "auto", environ)
    try:
        return asyncio.run(_run(args, environ))
    except asyncio.CancelledError:
        return TERMINATED
    except (AgentError, OSError) as error:
        return fail("sandbox", str(error), Exit.PROBLEM)


def _problem(args: argparse.Namespace) -> str:
    fewest, hint = default.FEWEST_GPUS, ", or any number from 1 with --interactive"
    where, gpus = "all GPUs but one", args.gpus - 1
    if args.interactive:
        fewest, hint, where, gpus = 1, "", "all GPUs", args.gpus
    if not fewest <= args.gpus <= MOST_GPUS:
        return f"--gpus {args.gpus}: the scenario needs {fewest} to {MOST_GPUS} GPUs{hint}"

    needed = default.NEEDED_SLICES
    if args.interactive:
        needed = stage.slices_of(stage.fitting(args.gpus))
    if (slices := gpus * args.split_count) >= needed:
        return ""
    return (
        f"the scenario needs {needed} slices on {where}, and there are {slices}; give --split-count"
        f" {math.ceil(needed / gpus)}"
    )


async def _run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the agent against simulated peers, take it through a scenario and check every claim.

    The agent is unchanged, and a child process. A kubelet, API server, scheduler and GPUs are
    simulated. Exits 0 only if all claims were true. Touches nothing outside its own temporary
    directory.
    """
    if task := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)

    # The timeline goes to standard output; with another form of output, to a terminal's standard
    # error.
    is_table = args.output == TABLE
    out = sys.stdout if is_table else sys.stderr
    width = max(40, shutil.get_terminal_size().columns if out.isatty() else 80)
    paint = painter(environ, out)

    def say(*lines: str) -> None:
        if is_table or out.isatty():
            out.writelines(f"{line}\n" for line in lines)
            out.flush()

    options = lab.LabOptions(
        gpus=described(f"{args.profile}:{args.gpus}"),
        environ=environ,
        arguments=("--split-count", str(args.split_count), *args.agent_flag),
        web_port=lab.free_port() if args.interactive else 0,
        keep=args.keep,
    )
    async with lab.open_cluster(options) as cluster:
        scene = default.open_stage(
            cluster, args.split_count, lambda moment: say(*moment_lines(moment, width, paint))
        )
        gpus = counted(args.gpus, f"{args.profile} GPU")
        say(f"{gpus}, kubelet, API server, scheduler are up")
        if args.keep:
            say(f"everything is kept in {cluster.places.root}")

        scenario = default.OPENING if args.interactive else default.DEFAULT
        record = await default.act(scene, scenario)
        # A node that offers nothing is one to look at.
        if args.interactive and (scene.placed or cluster.agent.code is None):
            say(invitation(cluster))
            await lab.keep_agent(cluster, scene.record.note)

        log = [] if record.ok else cluster.log.last(LOG_LINES)

    if is_table:
        head = ["", f"the agent's last {len(log)} log lines:"] if log else []
        say(*head, *log, *summary_lines(record.claims, record.measured, width))
    else:
        data = {
            "ok": record.ok,
            "claims": [dataclasses.asdict(claim) for claim in record.claims],
            "timeline": [dataclasses.asdict(moment) for moment in record.moments],
            "measured": dict(record.measured),
            "agentLog": log,  # empty if all claims were true
        }
        answer(args.output, "Sandbox", data, ())

    return Exit.OK if record.ok else Exit.PROBLEM


# Acts on simulated GPUs.

HARDWARE_SOCKET: Final = Path("/run/hami-agent/simulate.sock")

DEADLINE: Final = 5.0
"""Seconds for the simulation to answer."""

_COLUMNS: Final = [
    Column(title) for title in ("GPU", "UUID", "MODEL", "MEMORY", "PCI", "NUMA", "STATE", "XIDS")
]

_ACTIONS: Final[Mapping[talk.Action, tuple[str, str, str]]] = {
    "xid": ("A GPU reports an XID; 79 takes it off the bus.", "xid gpu", "79 --gpu 1"),
    "lose": ("A GPU stops answering, without an event.", "gpu", "--gpu 1"),
    "refuse": (
        "The driver refuses calls about a GPU until it is reset, without an event.",
        *("gpu", "--gpu 1"),
    ),
    "restore": ("A GPU or its slot is reset: it is healthy again.", "gpu", "--gpu 1"),
    "remove": ("A GPU is unplugged.", "gpu", "--gpu 1"),
    "hang": ("The driver answers nothing for a while.", "seconds", "30s"),
    "add": ("A GPU is plugged in.", "profile", "--profile a100"),
    "list": ("Show all GPUs.", "", "-o json"),
}
"""The help, the fields of the request that are arguments, and an example."""

_XID: Final = typed(whole(1, 65535), "an XID (1 to 65535)")
_SECONDS: Final = typed(duration(0.001, 86400), "a duration such as 500ms, 2s or 24h, the most")

_ARGUMENTS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "xid": ("xid", {"type": _XID, "metavar": "number", "help": "the XID, 1 to 65535"}),
    "gpu": ("--gpu", {"required": True, "metavar": "GPU", "help": "index or UUID"}),
    "seconds": ("seconds", {"type": _SECONDS, "metavar": "DURATION", "help": "at most 24h"}),
    "profile": ("--profile", {"help": "h100, a100, t4 or rtx3090; like GPU 0 if absent"}),
}
"""The argument that gives each field of a request."""


def _add_simulate(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "simulate",
        description=_simulate.__doc__,
        epilog="example: hami-agent simulate xid 79 --gpu 1",
    )
    where = f"control socket of the simulation (default {HARDWARE_SOCKET})"
    socket: dict[str, Any] = {"type": Path, "metavar": "PATH", "help": where}
    parser.add_argument("--socket", default=HARDWARE_SOCKET, **socket)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    for name, (text, fields, words) in _ACTIONS.items():
        example = f"example: hami-agent simulate {name} {words}"
        action = actions.add_parser(name, help=text, description=text, epilog=example)
        # People write it before the action or behind it.
        action.add_argument("--socket", default=argparse.SUPPRESS, **socket)
        add_output(action)
        for field in fields.split():
            flag, options = _ARGUMENTS[field]
            action.add_argument(flag, **options)


async def ask(args: argparse.Namespace) -> talk.HardwareReply:
    """Send the request of the action. Raises Unreachable."""
    _, fields, _ = _ACTIONS[args.action]
    request = talk.HardwareRequest(args.action, **{n: vars(args)[n] for n in fields.split()})
    try:
        async with asyncio.timeout(DEADLINE):
            return await talk.ask(args.socket, request)
    except (DriverError, TimeoutError) as error:
        silent = f"{args.socket} did not answer within {DEADLINE:g} s"
        raise Unreachable(str(error) or silent) from error


def _row(gpu: talk.GpuRow) -> tuple[str, ...]:
    memory = "unknown" if gpu.memory_mib is None else f"{gpu.memory_mib} MiB"
    numa, xids = "-" if gpu.numa is None else str(gpu.numa), ",".join(map(str, gpu.xids))
    return str(gpu.index), gpu.uuid, gpu.name, memory, gpu.pci, numa, gpu.state, xids or "-"


def _simulate(args: argparse.Namespace) -> int:
    """Act on the simulated GPUs of an agent that runs with --simulate, or of a sandbox."""
    reply = asyncio.run(ask(args))
    if reply.failed:
        code = Exit.NOT_FOUND if reply.failed == "unknown-gpu" else Exit.PROBLEM
        return fail("simulate", reply.text, code)

    lines: Iterable[str] = [reply.text]
    if args.action == "list":
        lines = table(_COLUMNS, [_row(gpu) for gpu in reply.gpus], UNFOLDED)

    data = {"action": args.action, "text": reply.text, "gpus": reply.gpus}
    answer(args.output, "Simulation", data, lines, source=str(args.socket))
    return Exit.OK
