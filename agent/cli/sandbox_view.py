"""Renders the output of `hami-agent sandbox`. Pure."""

import dataclasses
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent.sandbox.scenario.record import NOT_REACHED, Moment, ScenarioClaim

WIDTH: Final = 80
LOG_LINES: Final = 30
TIME_WIDTH: Final = 9
"""Characters of the longest time, 9999.99 s."""
ID_WIDTH: Final = 20
"""Characters of a claim's id."""
MEASURES: Final[Mapping[str, str]] = {
    "exec_to_registered": "exec of the agent → registered",
    "xid_to_kubelet": "XID 79 → list at the kubelet",
    "kubelet_socket_to_allocatable": "new kubelet's socket → allocatable back",
    "kill_to_serving": "SIGKILL → the next agent serves",
    "burst_to_decided": "burst with a SIGKILL in it → every pod decided",
    "sigterm_to_exit": "SIGTERM → exit",
}
_WORDS: Final = {True: "ok", False: "FAILED", None: ""}
_COLOURS: Final = {True: "\x1b[32m", False: "\x1b[31m", None: "\x1b[2m"}
_PLAIN: Final = "\x1b[0m"


class Style(msgspec.Struct, frozen=True):
    """The width of a line, and whether it is coloured."""

    width: int = WIDTH
    colour: bool = False


class Addresses(msgspec.Struct, frozen=True):
    """The paths and addresses of an interactive sandbox.

    `quiet`: the agent's health.quietPeriod. `gpu`: the index of a GPU for the examples. `program`:
    how to call hami-agent. `settings`: the agent's flags.
    """

    directory: Path
    web: str
    api: str
    hardware_socket: Path
    pod_file: Path
    log: Path
    kubeconfig: Path
    pid: int
    quiet: str
    gpu: int
    settings: Sequence[str]
    program: str = "hami-agent"


def cut(text: str, width: int) -> str:
    """Cut a line to `width` characters."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def moment_lines(moment: Moment, style: Style) -> Iterator[str]:
    """Render an entry of the timeline; its detail follows on the line if it fits, else below."""
    head = f"t+{moment.elapsed:6.2f}s  {_WORDS[moment.ok]:<6}  "
    text, detail = moment.text, " ".join(moment.detail.split())
    line = f"{text}: {detail}" if detail else text
    fits = len(head) + len(line) <= style.width
    room = style.width - len(head)
    first, *rest = [line] if fits else [*textwrap.wrap(text, room), *textwrap.wrap(detail, room)]
    yield _coloured(head, moment.ok, style) + first
    yield from (f"{' ' * len(head)}{line}" for line in rest)


def waiting_line(elapsed: float, awaited: str, style: Style) -> str:
    """Render what the scenario waits for; the next line replaces it."""
    return cut(f"t+{elapsed:6.2f}s  ...     {awaited}", style.width - 1)


def summary_lines(
    claims: Sequence[ScenarioClaim], measured: Mapping[str, float], style: Style
) -> Iterator[str]:
    """Render the measured times, the claims that failed, and how many were true."""
    yield ""
    times = {label: measured[name] for name, label in MEASURES.items() if name in measured}
    if times:
        width = min(max(map(len, times)), style.width - TIME_WIDTH - 2)
        yield f"{'MEASURED':<{width}}  TIME"
        for label, seconds in times.items():
            yield f"{cut(label, width):<{width}}  {duration(seconds)}"
        yield ""
    failed = [claim for claim in claims if not claim.ok and claim.measured != NOT_REACHED]
    true = sum(claim.ok for claim in claims)
    unchecked = len(claims) - true - len(failed)
    if failed:
        yield f"{'CLAIM':<{ID_WIDTH}}  FOUND"
    for claim in failed:
        name = cut(claim.id, ID_WIDTH)
        lines = textwrap.wrap(claim.measured, style.width - ID_WIDTH - 2) or [""]
        yield f"{name:<{ID_WIDTH}}  {lines[0]}".rstrip()
        yield from (f"{'':<{ID_WIDTH}}  {line}" for line in lines[1:])
    others = [f"{len(failed)} not"] * bool(failed) + [f"{unchecked} not checked"] * bool(unchecked)
    yield ", ".join([f"{true} of {len(claims)} claims checked and true", *others])


def duration(seconds: float) -> str:
    """Format a duration in ms or s."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def log_lines(lines: Sequence[str]) -> Iterator[str]:
    """Render the agent's last log lines, unchanged."""
    yield ""
    yield f"the agent's last {len(lines)} log lines:"
    yield from lines


def sandbox_data(
    claims: Sequence[ScenarioClaim],
    timeline: Sequence[Moment],
    measured: Mapping[str, float],
    log: Sequence[str],
) -> dict[str, object]:
    """The result for programs; `log` is empty if all claims were true."""
    return {
        "ok": all(claim.ok for claim in claims),
        "claims": [dataclasses.asdict(claim) for claim in claims],
        "timeline": [dataclasses.asdict(moment) for moment in timeline],
        "measured": dict(measured),
        "agentLog": list(log),
    }


def invitation(at: Addresses) -> str:
    """Render what to type in another terminal. Commands are never wrapped."""
    return textwrap.dedent(f"""
        The sandbox stays up until ctrl-c, which removes everything.
          web        {at.web}
          unix       {at.directory}/run/api.sock
          agent log  {at.log}
          API model  {at.api}
          directory  {at.directory}

        Try in another terminal:
          tail -n +1 -f {at.log}
          curl '{at.web}/readyz?verbose'
          curl {at.web}/metrics
          {at.program} status --socket {at.directory}/run/api.sock
          {at.program} status --by pod --socket {at.directory}/run/api.sock
          {at.program} doctor {shlex.join(at.settings)}
          {at.program} bundle --socket {at.directory}/run/api.sock
          {at.program} simulate --socket {at.hardware_socket} list
          {at.program} simulate --socket {at.hardware_socket} xid 79 --gpu {at.gpu}
          {at.program} simulate --socket {at.hardware_socket} restore --gpu {at.gpu}
            (a GPU that was reset is served again after {at.quiet} of quiet: health.quietPeriod)
          kill -9 {at.pid}
          export KUBECONFIG={at.kubeconfig}
          {at.program} explain demo/too-big
          {at.program} explain --recent
          {at.program} status --node sandbox
          {at.program} cordon 0 --node sandbox
          kubectl get pods --all-namespaces
          kubectl create --validate=false -f {at.pod_file}
          kubectl get node sandbox -o yaml
        """)


def _coloured(text: str, ok: bool | None, style: Style) -> str:  # noqa: FBT001 -- a claim's verdict
    return f"{_COLOURS[ok]}{text}{_PLAIN}" if style.colour else text
