"""What `doctor` makes of what it saw, check by check: each fault, and that a note is none.

A case is the findings and a line for each: id, verdict and what its text must say, after bars.
"""

import datetime as dt
import errno
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from agent.cli import checks
from agent.cli.checks import GROUPS, AgentAnswer, Finding, judge_report
from agent.cluster import HANDSHAKE, MUTEX_LOCK, REGISTER, SCORE
from agent.hami.annotations import (
    ReportProfile,
    encode_node_lock,
    encode_register,
    encode_register_colon,
    encode_reported,
)
from agent.ledger import HookFacts
from agent.model import GpuFault, Scan
from agent.node import Check, NodeSight, PathFacts, PluginSocket, Right, rights
from tests.builders import NODE, NOON, a_gpu
from tests.fakes.explain_rig import a_gpu as a_registered

Case = tuple[Finding | Iterable[Finding], list[str]]


def ago(seconds: float) -> dt.datetime:
    return NOON - dt.timedelta(seconds=seconds)


def text_of(one: Finding) -> str:
    return f"{one.check} {one.verdict} {one.subject} {one.said} {one.advice} {one.means} "


def check(found: Finding | Iterable[Finding], expected: list[str]) -> None:
    every = [found] if isinstance(found, Finding) else list(found)
    texts = [text_of(one) for one in every]

    assert len(expected) == len(every), texts
    for one, text, line in zip(every, texts, expected, strict=True):
        head, *parts = line.split("|")
        assert text.startswith(f"{head} "), text
        assert [] == [part for part in parts if part not in text], text
        assert one.said
        assert one.check in GROUPS, text
        assert bool(one.advice) != (one.verdict == "ok"), "a fault has a remedy, and nothing else"
        assert "\x1b" not in text, "nothing that a terminal obeys"


DIRECTORY = PathFacts("/d", "directory", mode=0o750)
OPEN = replace(DIRECTORY, mode=0o707)
THEIRS = replace(DIRECTORY, owner=7, ours=False)
CHOWN = "chown root and chmod 0755 /d"
NO_SLICE = "no new pod gets a GPU of this node"
SCAN = Scan("570", (a_gpu(),))
MIG = Scan("570", (a_gpu(), a_gpu(mig_enabled=True)), (GpuFault("index 2", "fell off the bus"),))

HOST: list[Case] = [
    (checks.judge_path(DIRECTORY, made=False), ["P-PATHS ok"]),
    (checks.judge_path(PathFacts("/d", ""), made=True), ["P-PATHS ok"]),
    (
        checks.judge_path(PathFacts("/d", "", failure=errno.EROFS), made=True),
        ["P-PATHS wrong|cannot be created: Read-only file system"],
    ),
    (checks.judge_path(PathFacts("/d", ""), made=False), ["P-PATHS wrong|does not exist"]),
    (checks.judge_path(PathFacts("/d", "file"), made=True), ["P-PATHS wrong|is a file"]),
    (
        checks.judge_path(OPEN, made=True),
        [f"P-PATHS wrong|every user may write there (mode 0707)|{CHOWN}"],
    ),
    (checks.judge_path(THEIRS, made=True), [f"P-PATHS wrong|belongs to uid 7|{CHOWN}"]),
    (
        checks.judge_path(replace(DIRECTORY, failure=errno.EACCES), made=False),
        ["P-PATHS wrong|cannot be written: Permission denied (owner 0, mode 0750)|run as its"],
    ),
    (
        checks.judge_path(replace(DIRECTORY, failure=errno.EROFS), made=True),
        ["P-PATHS wrong|cannot be written: Read-only file system|mount it read-write|dmesg"],
    ),
    (
        checks.judge_path(replace(DIRECTORY, failure=errno.ENOSPC), made=True),
        ["P-PATHS wrong|No space left on device|free some space"],
    ),
    (checks.judge_driver("NVML", SCAN, ""), ["P-DRIVER ok|driver 570, 1 GPU: "]),
    (
        checks.judge_driver("NVML", MIG, ""),
        ["P-DRIVER ok|driver 570, 2 GPUs", "P-DRIVER note|MIG mode", "P-DRIVER note|fell off"],
    ),
    (checks.judge_driver("NVML", Scan("570", ()), ""), ["P-DRIVER wrong|no GPU"]),
    # A driver that fails is repaired and not installed; a remedy that is known is said once.
    (checks.judge_driver("NVML", None, "Unknown Error"), ["P-DRIVER wrong|Unknown Error|dmesg"]),
    (checks.judge_driver("NVML", None, "lost", "install it"), ["P-DRIVER wrong|lost install it"]),
]

LIBRARY = PathFacts("/h/vgpu/libvgpu.so", "file", mode=0o644)
PRELOAD = PathFacts("/h/vgpu/ld.so.preload", "file", mode=0o644)
GOOD = HookFacts("/h/vgpu/libvgpu.so", preload="/h/vgpu/libvgpu.so\n", hook_path="/h")
UNREAD = {"kind": "path that cannot be looked at (denied)"}


def with_library(**change: object) -> tuple[Finding, ...]:
    """The library is changed so, then ld.so.preload."""
    of_library = checks.judge_library_files(replace(LIBRARY, **change), PRELOAD, GOOD)
    return (*of_library, *checks.judge_library_files(LIBRARY, replace(PRELOAD, **change), GOOD))


def with_facts(**change: object) -> Iterable[Finding]:
    return checks.judge_library_files(LIBRARY, PRELOAD, replace(GOOD, **change))


EACH_WRONG = ["P-PRELOAD wrong /h/vgpu/libvgpu.so", "P-PRELOAD wrong /h/vgpu/ld.so.preload"]
EACH_UNKNOWN = [line.replace("wrong", "unknown") for line in EACH_WRONG]
ONLY_LINE = [f"{EACH_WRONG[1]}|make /h/vgpu/libvgpu.so its only line|{NO_SLICE}"]

FILES: list[Case] = [
    (with_facts(), ["P-PRELOAD ok /h/vgpu/libvgpu.so|/h/vgpu/ld.so.preload names it"]),
    (with_library(mode=0o664), EACH_WRONG),
    (with_library(mode=0o640), EACH_WRONG),
    (with_library(ours=False), EACH_WRONG),
    (with_facts(preload=""), ONLY_LINE),
    (with_facts(preload="/h/vgpu/libvgpu.so\r\n"), ONLY_LINE),
    (with_facts(preload="/opt/x.so\n/h/vgpu/libvgpu.so\n"), ["P-PRELOAD ok"]),
    (with_facts(loadable=False), [f"{EACH_WRONG[0]}|{NO_SLICE}"]),
    (
        with_library(**UNREAD),
        [f"{line}|is a path that cannot be looked at (denied)" for line in EACH_UNKNOWN],
    ),
    (with_library(kind=""), [f"{line}|was removed during this check" for line in EACH_UNKNOWN]),
    (
        checks.judge_library_files(
            replace(LIBRARY, **UNREAD), replace(PRELOAD, **UNREAD), replace(GOOD, preload=None)
        ),
        EACH_UNKNOWN,
    ),
]

HAMI = PluginSocket("/d/nvidia-gpu.sock", alive=True)
LEFT = replace(HAMI, alive=False)
OTHER = PluginSocket("/d/rdma.sock", alive=True)
MONITOR = "P-MONITOR note|vGPUmonitor|31992"
THEIR_POD = "hami/hami-device-plugin-x"


def plugins(
    *sockets: PluginSocket,
    pod: str = "",
    place: PathFacts = DIRECTORY,
    reported: bool = False,
    takeover: bool = False,
) -> list[Finding]:
    pods = [pod] * bool(pod)
    found = checks.judge_plugins(place, sockets, pods, reported=reported, takeover=takeover)
    return list(found)


SERVER: list[Case] = [
    (checks.judge_node(NODE, NodeSight(NODE)), ["P-NODE ok", "P-LABEL note"]),
    (checks.judge_node(NODE, NodeSight(NODE, {"gpu": "on"})), ["P-NODE ok", "P-LABEL ok"]),
    (checks.judge_node(NODE, None), ["P-NODE wrong"]),
    (
        checks.judge_rights("here", (), (), checks.UNNEEDED[:2]),
        ["P-RIGHTS ok", "P-EXCESS note|wider than needed: list nodes, delete nodes"],
    ),
    (plugins(), ["P-PLUGIN ok"]),
    (plugins(LEFT), ["P-PLUGIN ok"]),
    (plugins(HAMI), ["P-PLUGIN wrong", MONITOR]),
    (plugins(pod=THEIR_POD), ["P-PLUGIN wrong", MONITOR]),
    (plugins(reported=True), ["P-PLUGIN ok", MONITOR]),
    (plugins(place=PathFacts("/d", "")), []),
    (
        plugins(HAMI, pod=THEIR_POD, takeover=True),
        ["P-PLUGIN note|right after", "P-PLUGIN note|right after", MONITOR],
    ),
]

TWO = tuple(a_registered(f"GPU-{index}", index) for index in range(2))
SICK = tuple(replace(gpu, healthy=False) for gpu in TWO)
REPORT = NodeSight(NODE, annotations={REGISTER: encode_register(TWO)}, capacity=40)
OLD, FRESH = (replace(REPORT, written=ago(seconds)) for seconds in (90, 5))
NONE_HEALTHY, UNREADABLE, NO_REPORT = (
    replace(REPORT, annotations=notes)
    for notes in ({REGISTER: encode_register(SICK)}, {REGISTER: "[?"}, {})
)
COLON_FORM = replace(REPORT, annotations={REGISTER: encode_register_colon(TWO)})
JSON, COLON = ReportProfile.JSON, ReportProfile.COLON
OTHERWISE = replace(REPORT, differences=("a",))
MORE = replace(REPORT, differences=("a", "b"))


def by_another(sight: NodeSight) -> NodeSight:
    return replace(sight, reported_by="other T")


def offer(allocatable: int, sight: NodeSight = REPORT) -> Finding:
    return checks.judge_offer(replace(sight, allocatable=allocatable), "nvidia.com/gpu", NOON)


def handshake(text: str, profile: ReportProfile, sight: NodeSight = REPORT) -> Finding:
    notes = {**sight.annotations, **({HANDSHAKE: text} if text else {})}
    return checks.judge_handshake(replace(sight, annotations=notes), profile, NOON)


def a_lock(seconds: float) -> str:
    return encode_node_lock(ago(seconds), "demo", "late")


def lock(text: str | None) -> Finding:
    sight = NodeSight(NODE, annotations={} if text is None else {MUTEX_LOCK: text})
    return checks.judge_lock(sight, NOON)


def left(
    *sockets: PluginSocket, stamps: bool = False, scores: bool = False, **notes: str
) -> list[Finding]:
    keys = {"handshake": HANDSHAKE, "score": SCORE}
    sight = NodeSight(NODE, annotations={keys[name]: text for name, text in notes.items()})
    return list(checks.judge_leftovers(sight, sockets, stamps=stamps, scores=scores))


SCHEDULER: list[Case] = [
    (offer(20), ["P-OFFER ok"]),
    (offer(12), ["P-OFFER wrong|kube-scheduler counts fewer slices than HAMi's"]),
    (offer(30), ["P-OFFER wrong|HAMi's scheduler counts fewer slices than kube-"]),
    (offer(5, UNREADABLE), ["P-OFFER note|5; there is no readable"]),
    (offer(12, replace(REPORT, written=ago(14))), ["P-OFFER note"]),  # the kubelet has 15 s
    (offer(12, replace(REPORT, written=ago(16))), ["P-OFFER wrong"]),
    (judge_report(REPORT, JSON), ["P-REPORT ok|HAMi's scheduler 2.8 and later"]),
    (judge_report(NO_REPORT, JSON), ["P-REPORT wrong|does not exist"]),
    (judge_report(UNREADABLE, JSON), ["P-REPORT wrong|cannot be read"]),
    (
        judge_report(REPORT, COLON),
        ["P-REPORT wrong|not have the form for HAMi's scheduler 2.5 to 2.7.1"],
    ),
    (judge_report(COLON_FORM, COLON), ["P-REPORT ok|2.5 to 2.7"]),
    (judge_report(OTHERWISE, JSON), ["P-REPORT note| a give this check"]),
    (judge_report(MORE, JSON), ["P-REPORT note| a, and 1 more"]),
    (judge_report(REPORT, None), ["P-REPORT ok|says what the agent would write"]),
    (judge_report(OTHERWISE, None), ["P-REPORT note| a unless"]),
    (handshake("Deleted_x", JSON), ["P-HANDSHAKE wrong|dropped this node's GPUs"]),
    (handshake("Requesting_2026.11.20 10:00:00", JSON), ["P-HANDSHAKE ok|has read the report"]),
    (handshake("Reported x", JSON), ["P-HANDSHAKE ok|Reported: schedulers from 2.8 on do not"]),
    (handshake("", JSON), ["P-HANDSHAKE note|no scheduler has read the present report"]),
    (handshake("", JSON, OLD), ["P-HANDSHAKE note|which is 90 s old"]),
    (handshake("", JSON, FRESH), ["P-HANDSHAKE ok|the report is new"]),
    (handshake("", JSON, NO_REPORT), ["P-HANDSHAKE ok|or there is none"]),
    (handshake("", JSON, NONE_HEALTHY), ["P-HANDSHAKE ok|offers no slice"]),
    (handshake("", COLON), ["P-HANDSHAKE wrong|the agent's stamp is absent"]),
    (handshake(encode_reported(ago(90)), COLON), ["P-HANDSHAKE note|report of 90 s ago"]),
    (handshake(encode_reported(ago(9)), COLON), ["P-HANDSHAKE ok|stamps are read"]),
    (handshake("Reported 2001-01-01 10:00:00", COLON), ["P-HANDSHAKE ok|stamps are read"]),
    (checks.judge_writer(OTHERWISE), ["P-WRITER ok"]),
    (checks.judge_writer(by_another(REPORT)), ["P-WRITER ok|would write the same"]),
    (checks.judge_writer(by_another(OTHERWISE)), ["P-WRITER note|other changed it at T"]),
    (checks.judge_writer(by_another(UNREADABLE)), ["P-WRITER note"]),
    (lock(None), ["P-LOCK ok|free"]),
    (lock("\x1b?"), ["P-LOCK wrong|cannot be read"]),
    (lock(a_lock(59)), ["P-LOCK ok|by pod demo/late for 59 s"]),
    (lock(a_lock(61)), ["P-LOCK note|by pod demo/late for 61 s"]),
    (lock(a_lock(301)), ["P-LOCK wrong|for 5 min"]),
    (lock(a_lock(301).partition(",")[0]), ["P-LOCK wrong|an unnamed pod"]),
    (
        left(LEFT, HAMI, replace(OTHER, alive=False), handshake="Reported 2026", score="[]"),
        [
            "P-LEFTOVERS note /d/nvidia-gpu.sock",
            f"P-LEFTOVERS note {HANDSHAKE} of Node {NODE}",
            f"P-LEFTOVERS note {SCORE} of Node {NODE}",
        ],
    ),
    (left(handshake="Reported 2026", score="[]", stamps=True, scores=True), ["P-LEFTOVERS ok"]),
    (left(handshake="Requesting_2026"), ["P-LEFTOVERS ok"]),
    (left(), ["P-LEFTOVERS ok"]),
]


def answer(*failed: Check, failure: str = "", denied: bool = False) -> list[Finding]:
    made = () if failure else (Check("state", ok=True), Check("stream", ok=True), *failed)
    given = AgentAnswer("/s", made, failure, denied)
    return list(checks.judge_agent(given))


def failed(name: str, text: str, *, required: bool = False) -> Check:
    return Check(name, ok=False, text=text, required=required)


AGENT: list[Case] = [
    (answer(), ["P-AGENT ok /s the agent is ready; 2 checks of it passed"]),
    (
        answer(failed("gpus", "there are no GPUs to share")),
        ["P-AGENT note gpus there are no GPUs to share", "P-AGENT ok /s"],
    ),
    (  # it serves on: the line must not say that no pod gets a GPU
        answer(failed("api", "the watch of this node's pods is down")),
        ["P-AGENT note api|is down|new pods with GPUs may be refused", "P-AGENT ok /s"],
    ),
    (
        answer(failed("settings", "the last good settings apply, because these are refused: x")),
        ["P-AGENT note settings|the agent shares by|`hami-agent config check FILE`", "P-AGENT ok"],
    ),
    (
        answer(failed("gpu_health", "GPU 2 is bad: XID 48 [H-048]")),
        [
            "P-AGENT note|`hami-agent status`|no new pod gets this GPU; pods that hold it may fail",
            "P-AGENT ok",
        ],
    ),
    (
        answer(
            failed("registered", "the kubelet is away", required=True),
            failed("stream", "no", required=True),
        ),
        ["P-AGENT wrong registered the kubelet is away", "P-AGENT wrong stream no"],
    ),
    (answer(failed("novelty", "", required=True)), ["P-AGENT wrong novelty fails"]),
    (answer(failure="no such file"), ["P-AGENT wrong /s no agent answers: no such file"]),
    (answer(failure="denied", denied=True), ["P-AGENT unknown /s denied"]),
]


@pytest.mark.parametrize(("found", "expected"), [*HOST, *FILES, *SERVER, *SCHEDULER, *AGENT])
def test_each_finding_is_one_line(found: Finding | Iterable[Finding], expected: list[str]):
    check(found, expected)


def test_a_driver_that_fails_is_not_installed():
    (found,) = checks.judge_driver("NVML", None, "Unknown Error")

    assert "install" not in found.advice


def test_rights_are_asked_for_this_node_and_by_the_name_of_a_pod():
    asked, more = rights(NODE), rights(NODE, node_condition=True)

    assert {NODE} == {right.name for right in asked if right.resource == "nodes"}
    assert {Right("patch", "nodes/status", name=NODE)} == set(more) - set(asked)
    for_all = {(one.verb, one.resource) for one in more if not one.selector and one.name != NODE}
    assert set() == for_all & {(one.verb, one.resource) for one in checks.UNNEEDED}
