"""The values of an explanation, its words for amounts, and what others have said of the pod."""

import datetime as dt
import enum
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from agent.allocate.room import ContainerRequest
from agent.cluster import VGPU_NODE
from agent.errors import cap
from agent.kit.units import age, gib
from agent.kube.client import WRITER
from agent.kube.objects import EPOCH
from agent.kube.reader import ClusterSnapshot, JsonObject, PodEventView
from agent.web.runbook import entries


class GateVerdict(enum.Enum):
    """What a gate says."""

    PASSED = "passed"
    BLOCKED = "blocked"
    WAITING = "waiting"
    """Another program has to act, and normally does so soon."""
    NOTED = "noted"
    """It blocks nothing."""
    NOT_REACHED = "not-reached"
    UNKNOWN = "unknown"
    """The data for it could not be read."""


class Gate(msgspec.Struct, frozen=True):
    """One gate on a pod's way to a running container.

    - `said`: one sentence. `advice`: what to do; empty if nothing.
    - `reason`: the runbook's id; empty if there is nothing to look up.
    - `facts`: more lines.
    """

    name: str
    verdict: GateVerdict
    said: str
    reason: str = ""
    advice: str = ""
    facts: tuple[str, ...] = ()


class GpuVerdict(msgspec.Struct, frozen=True, rename="camel"):
    """One GPU for the container that does not fit; `reason` is empty if the GPU fits.

    `promised_…` is what other pods were given, whether they use it or not. `said`: what the reason
    and the figures do not say.
    """

    uuid: str
    index: int
    model: str
    reason: str
    said: str
    registered_mib: int
    promised_mib: int
    asked_mib: int
    core_percent: int
    promised_percent: int
    asked_percent: int
    slots: int
    used_slots: int


class NodeVerdict(msgspec.Struct, frozen=True, rename="camel"):
    """One Node: whether the pod fits, else HAMi's reason and each GPU.

    - `reason`: the scheduler's text, such as `2/8 CardInsufficientMemory`.
    - `said`: the same in words. `codes`: the runbook's ids.
    - `biggest`: the pods that hold most of what is short there, as text.
    - `events`: what the Node's agent said last.
    """

    name: str
    is_fit: bool
    reason: str = ""
    said: str = ""
    codes: tuple[str, ...] = ()
    gpus: tuple[GpuVerdict, ...] = ()
    biggest: tuple[str, ...] = ()
    events: tuple[str, ...] = ()


class PlacingChange(msgspec.Struct, frozen=True, rename="camel"):
    """A change with which the scheduler's model places the pod on `node`.

    `paste`: the command, or the line of YAML, that makes it; empty if there is none.
    """

    said: str
    node: str
    paste: str = ""


class Explanation(msgspec.Struct, frozen=True, rename="camel"):
    """All that is said of one pod.

    - `headline`: one sentence: state, age and request. `blocked`: a gate says no.
    - `nodes`: a few of the Nodes, nearest to a fit first; `nodes_by_reason` counts all.
    - `tried`: changes were tried, also where none is in `changes`.
    - `missing`: parts of the cluster that could not be read, each with why.
    """

    namespace: str
    pod: str
    phase: str
    headline: str
    blocked: bool
    gates: tuple[Gate, ...]
    nodes: tuple[NodeVerdict, ...] = ()
    nodes_by_reason: Mapping[str, int] = msgspec.field(default_factory=dict)
    changes: tuple[PlacingChange, ...] = ()
    tried: bool = False
    missing: tuple[str, ...] = ()


def request_words(request: ContainerRequest) -> str:
    """What one container asks for."""
    gpus = "1 GPU slice" if request.count == 1 else f"{request.count} GPU slices, each"
    if request.memory_mib:
        memory = f"{mib(request.memory_mib)} ({gib(request.memory_mib)})"
    else:
        memory = f"{min(request.memory_percent, 100)} % of the memory"
    counted_as = " (which counts as 100 %)" if request.core_percent > 100 else ""
    return f"{gpus} with {memory} and {core_words(request.core_percent)}{counted_as}"


def core_words(percent: int) -> str:
    """A core share; 0 is no limit."""
    return f"{percent} % of the cores" if percent else "no limit of cores"


def mib(number: int) -> str:
    """Memory with its unit."""
    return f"{number:,} MiB"


# What schedulers, kubelets and agents have said of the pod, and what their texts mean.

TEXT: Final = 512
"""Characters of a message: the sentence of a refusal with the id at its end fits."""
EVENTS_TOLD: Final = 3
ATTEMPT: Final = dt.timedelta(seconds=2)
"""HAMi's scheduler writes one Event for each reason of an attempt, all within this time."""
NODE_UNREGISTERED: Final = "NodeUnregistered"
"""The runbook's id for HAMi's text `node unregistered`."""
_NOWHERE: Final = re.compile(r"\d+/\d+ nodes are available|no nodes available")
_BINDING: Final = re.compile(r"\b[Bb]ind(?:ing)?\b|node lock|has been locked")
_REASON: Final = re.compile(
    r"(?:(\d+)/\d+ )?\b((?:Card|Node|Numa|Exclusive|Allocated|ResourceQuota)[A-Z]\w+)"
)
_TOTAL: Final = "no available node"


class AttemptStage(enum.Enum):
    """How far the last attempt to place the pod came."""

    REFUSED = enum.auto()
    """No Node suited."""
    ERROR = enum.auto()
    """It could not be decided: the scheduler or its extender failed."""
    CHOSEN = enum.auto()
    """A Node was chosen; what failed later is about the binding."""


class Attempt(msgspec.Struct, frozen=True):
    """What was said last about placing the pod. `reasons`: GPUs, or attempts, by HAMi's reason.

    `named`: HAMi's own Events of the attempt, which name the Nodes.
    """

    stage: AttemptStage
    text: str
    at: dt.datetime | None
    reasons: Mapping[str, int] = msgspec.field(default_factory=dict)
    named: str = ""

    def said(self, now: dt.datetime) -> str:
        """The attempt with its age."""
        return f"last attempt {when(self.at, now)}: {cap(self.text, TEXT)}"


def last_attempt(snapshot: ClusterSnapshot) -> Attempt | None:
    """The last attempt by the pod's condition and Events; None if no scheduler has said a word.

    kube-scheduler counts a repeated Event and keeps its first text; the pod's condition has the
    last one. Source: client-go 1.36 tools/events/event_broadcaster.go, getKey.
    """
    kube, kube_at = last_event(snapshot, "FailedScheduling")
    failed, failed_at = last_event(snapshot, "FilteringFailed")
    passed, passed_at = last_event(snapshot, "FilteringSucceed", "BindingFailed")
    text = kube.message if kube else ""
    for condition in snapshot.pod["status"].get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            text = str(condition.get("message") or "") or text
    if passed_at < failed_at:
        passed = None
    if text and not _NOWHERE.match(text):
        if passed and passed.reason == "BindingFailed":
            return Attempt(AttemptStage.CHOSEN, passed.message, passed.last)
        stage = AttemptStage.CHOSEN if _BINDING.search(text) else AttemptStage.ERROR
        return Attempt(stage, text, kube.last if kube else None)
    if passed and passed_at > kube_at:
        return Attempt(AttemptStage.CHOSEN, passed.message, passed.last)
    reasons: Counter[str] = Counter()
    for count, reason in _REASON.findall(text.replace("node unregistered", NODE_UNREGISTERED)):
        reasons[reason] += int(count or 1)
    of_hami = [one for one in snapshot.events if one.reason == "FilteringFailed" and one.last]
    group = [one.message for one in of_hami if failed_at - (one.last or EPOCH) <= ATTEMPT]
    group = [message for message in group if not message.startswith(_TOTAL)] or group
    reasons = reasons or Counter(reason for _, reason in _REASON.findall(" ".join(group)))
    # The reason of most GPUs first: it is the one to read.
    group.sort(
        key=lambda said: -max((reasons[each] for _, each in _REASON.findall(said)), default=0)
    )
    named = "; ".join(group)
    if failed and kube_at < failed_at:
        return Attempt(AttemptStage.REFUSED, named, failed.last, reasons, named)
    if text:
        return Attempt(AttemptStage.REFUSED, text, kube.last if kube else None, reasons, named)
    # Its Events may be gone; the scheduler's annotation says that it chose a Node.
    is_noted = VGPU_NODE in (snapshot.pod["metadata"].get("annotations") or {})
    return Attempt(AttemptStage.CHOSEN, "", None) if is_noted else None


def last_event(snapshot: ClusterSnapshot, *reasons: str) -> tuple[PodEventView | None, dt.datetime]:
    """The pod's last Event with one of the reasons, and when it was; EPOCH if there is none."""
    dated = [event for event in snapshot.events if event.reason in reasons and event.last]
    last = max(reversed(dated), key=lambda event: event.last or EPOCH, default=None)
    return last, (last.last or EPOCH) if last else EPOCH


_GPUS: Final = re.compile(r"GPUs? [^:]*(?=: )")
"""The GPUs at the beginning of an Event. Source: gpus_in_words of agent/report.py."""


def agent_events(events: Iterable[PodEventView], about: str = "") -> list[PodEventView]:
    """The last Events of agents, one for each GPU or else reason; warnings first, then the newest.

    `about`: those of that object alone.
    """
    own = [one for one in events if one.writer == WRITER and (not about or one.about == about)]
    # Times are whole seconds; a GPU that is taken back is unhealthy and recovers in one.
    own.sort(key=lambda one: (one.last or EPOCH, one.reason == "GpuRecovered"), reverse=True)
    found: dict[tuple[str, str], PodEventView] = {}
    for event in own:
        gpus = _GPUS.match(event.message)
        # What offers slices again ends what offered none.
        reason = "NothingOffered" if event.reason == "SlicesOffered" else event.reason
        found.setdefault((event.about, gpus[0] if gpus else reason), event)
    return sorted(found.values(), key=lambda event: event.kind != "Warning")


def agent_words(
    events: Iterable[PodEventView], now: dt.datetime, about: str = ""
) -> tuple[str, ...]:
    """What agents say in the first of these Events."""
    return tuple(
        f"the agent, {when(event.last, now)}: {event.reason}: {cap(event.message, TEXT)}"
        for event in agent_events(events, about)[:EVENTS_TOLD]
    )


_SAYING: Final = re.compile(r"^\| (`.+`) \| (.+) \| (.+) \|$", re.MULTILINE)
"""A row of the runbook: texts of a kubelet or container runtime, their cause, and what to do."""


def meaning(text: str, node: str) -> tuple[tuple[str, ...], str]:
    """Causes and remedy of a kubelet's or runtime's text; both empty if it is not known."""
    for texts, cause, remedy in _SAYING.findall(entries()["E-START"][1]):
        if any(each in text for each in texts.strip("`").split("`, `")):
            return (cause,), remedy.replace("NODE", cap(node, 128) or "the node")
    return (), ""


_ID: Final = re.compile(r"\[(HA-\d{4})\]")
_WRAPPED: Final = re.compile(r"rpc error: code = \w+ desc = (.*?) *\[HA-\d{4}\]", re.DOTALL)


def agent_refusal(message: str) -> tuple[str, str]:
    """Sentence and id of a refusal of the agent; both empty if another program refused."""
    found, wrapped = _ID.search(message), _WRAPPED.search(message)
    return (wrapped[1] if wrapped else message, found[1]) if found else ("", "")


def when(moment: dt.datetime | None, now: dt.datetime) -> str:
    """How long ago it was."""
    return f"{age(moment, now)} ago" if moment else "at an unknown time"


def recreated(pod: JsonObject) -> str:
    """How another pod comes in place of this one: by its controller, or by who created it."""
    owners = pod["metadata"].get("ownerReferences") or ()
    owner = next((one for one in owners if one.get("controller")), None)
    if owner is None:
        return "create the pod again"
    if owner.get("kind") == "Node":
        return "it is a static pod, which gets no GPUs: make it a DaemonSet"
    name = (
        f"its {cap(str(owner.get('kind')), 64)} {cap(str(owner.get('name')), 256)} creates another"
    )
    return name if pod["status"].get("phase") == "Failed" else f"delete the pod, so that {name}"


def status_text(pod: JsonObject) -> str:
    """Why the kubelet ended the pod, in its words."""
    status = pod["status"]
    return str(status.get("message") or status.get("reason") or "")
