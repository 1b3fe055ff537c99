"""Every claim of the default scenario, with the results, the timeline and the measurements."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.sandbox.scenario.workloads import PLACED

NOT_REACHED: Final = "the scenario ended before"


def promises(gpus: int, split_count: int) -> Mapping[str, str]:
    """Claim id → sentence, for a node with that many GPUs and slices for each."""
    whole, rest = gpus * split_count, (gpus - 1) * split_count
    return {
        "registered": "the agent registers with the kubelet",
        "allocatable": f"{whole} slices are allocatable on the Node",
        "annotation": f"the register annotation names {gpus} healthy GPUs",
        **_placing(),
        "too-big.pending": "a pod that cannot fit stays Pending with a reason",
        "requests": "each GPU pod costs two writes, one read for each answer and one more",
        "used": "the metrics say what each container uses of its GPUs",
        "xid.allocatable": f"one GPU is gone: {rest} allocatable",
        "xid.annotation": "the register annotation shows it as unhealthy",
        "xid.running": "the pod on it stays Running",
        "xid.avoided": "no new pod is placed on it",
        "kubelet.allocatable": f"after the kubelet's restart {rest} are allocatable",
        "kubelet.untouched": "no container was affected or allocated again",
        "kill.allocatable": f"after the SIGKILL {rest} are allocatable, never {whole}",
        "kill.rows": "the new agent has every row of the ledger",
        "kill.untouched": "no container was affected or allocated again",
        "burst.pods": "every pod is served, or was rejected in the gap",
        "burst.edits": "every pod that is served has what the scheduler wrote",
        "burst.durable": "no acknowledged answer is lost",
        "burst.lock": "the node lock is free again",
        "replay.edits": "a repeated Allocate gets the same answer, byte for byte",
        "disk_first": "every answer was on disk before the kubelet had it",
        "sums": "no GPU was ever oversold",
        "idle": "when idle: no write, no read, two watches",
        "stop": "SIGTERM ends the agent cleanly",
    }


def _placing() -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name in (workload.name for workload in PLACED):
        found[f"{name}.running"] = f"pod {name} runs"
        found[f"{name}.edits"] = f"pod {name} has what the scheduler wrote"
        found[f"{name}.settled"] = f"pod {name} is settled, the lock is free"
    return found


@dataclass(frozen=True, slots=True)
class ScenarioClaim:
    """One claim and its result. `measured`: what the check found."""

    id: str
    sentence: str
    ok: bool
    measured: str


@dataclass(frozen=True, slots=True)
class Moment:
    """One entry of the timeline, `elapsed` seconds after its start; `ok` None: not a claim."""

    elapsed: float
    text: str
    detail: str = ""
    ok: bool | None = None
    claim: str = ""


class Unmet(Exception):  # noqa: N818 -- a claim that was not met, not an error of ours
    """A wait had no result, so the scenario cannot continue."""


@dataclass(eq=False, slots=True)
class ScenarioRecord:
    """The record that the steps fill. `promised`: claim id → sentence, in order."""

    promised: Mapping[str, str]
    tell: Callable[[Moment], None]
    started: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    moments: list[Moment] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    _found: dict[str, tuple[bool, str]] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Add an entry to the timeline that is not a claim."""
        self._add(Moment(self.elapsed, text))

    def settle(self, claim: str, measured: str, problems: Iterable[str] = ()) -> None:
        """Set the result of one claim: true without problems. A false claim stays false.

        Raises:
            KeyError: the claim is not in `promised`.
        """
        sentence, found = self.promised[claim], list(problems)
        before = self._found.get(claim, (True, ""))[0]
        ok = before and not found
        text = "; ".join(found) if found else measured
        self._found[claim] = (ok, text)
        self._add(Moment(self.elapsed, sentence, text, ok, claim))

    @property
    def claims(self) -> tuple[ScenarioClaim, ...]:
        """Every promised claim. One that was not checked is not true."""
        return tuple(
            ScenarioClaim(name, sentence, *self._found.get(name, (False, NOT_REACHED)))
            for name, sentence in self.promised.items()
        )

    @property
    def ok(self) -> bool:
        """Whether every claim was checked and true."""
        return all(claim.ok for claim in self.claims)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return asyncio.get_running_loop().time() - self.started

    def _add(self, moment: Moment) -> None:
        self.moments.append(moment)
        self.tell(moment)
