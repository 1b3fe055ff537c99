"""A fault is one line: what follows from it is left out. Readiness.

What `doctor` makes of what it saw, check by check: each fault, and that a note is none.

A case is the findings and a line for each: id, verdict and what its text must say, after bars.
"""

import datetime as dt
import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agent.cli import doctor
from agent.cli.doctor import (
    ADVICE,
    CAUSES,
    CHECKS,
    GROUPS,
    MEANS,
    NO_OFFER,
    SERVED,
    Finding,
    NodeSeen,
    concluded,
)
from agent.cluster import HANDSHAKE, REGISTER
from agent.hami.annotations import ReportProfile, encode_json
from agent.kube.reader import ClusterNode
from agent.model import GpuFault, Scan, Trouble
from agent.node import Check, Right, is_ready, rights
from agent.settings.reading import Sources, make_plan
from agent.status import GpuStatus, LockStatus, NodeStatus, StatusDocument
from tests.builders import NODE, NOON, a_gpu
from tests.fakes.explain_rig import a_gpu as a_registered
from tests.unit.rows import rows_of

KUBELET = Finding("P-KUBELET", "wrong", "/k", "no socket", "start it")
OFFER = Finding("P-OFFER", "wrong", "n", "0, not 20", "look")
STREAM = Finding("P-AGENT", "wrong", "stream", "the kubelet is away", "look")


def all_of(*findings):
    return [*concluded(findings, frozenset(GROUPS))]


@pytest.mark.parametrize("verdict", ["wrong", "note"])
@pytest.mark.parametrize(
    ("cause", "follows"),
    [
        ("P-KUBELET", OFFER),
        ("P-AGENT", OFFER),
        ("P-KUBELET", STREAM),
        ("P-KUBELET", Finding("P-WITNESS", "wrong", "/r", "silent")),
        ("P-DRIVER", Finding("P-GPU", "wrong", "GPU 1", "is silent")),
        ("P-RIGHTS", Finding("P-REPORT", "wrong", "n", "dropped")),
    ],
)
def test_what_follows_from_a_fault_is_left_out(verdict, cause, follows):
    found = all_of(replace(KUBELET, check=cause), replace(follows, verdict=verdict))

    assert [(cause, "wrong")] == [(one.check, one.verdict) for one in found]


def test_what_is_well_or_not_known_is_no_consequence():
    others = [Finding("P-OFFER", "ok", "n", "20"), Finding("P-WITNESS", "unknown", "n", "denied")]

    assert ["wrong", "unknown", "ok"] == [one.verdict for one in all_of(KUBELET, *others)]


def test_every_check_has_a_remedy_and_causes_that_there_are():
    assert [*CHECKS] == [*ADVICE]
    assert MEANS.keys() < CHECKS.keys()
    assert {cause for causes in CAUSES.values() for cause in causes} <= CHECKS.keys()
    assert not [check for check, causes in CAUSES.items() if check in causes]


def test_the_chosen_groups_come_in_the_order_of_the_checks():
    lock = Finding("P-LOCK", "ok", "n", "free")
    chosen = concluded([lock, OFFER, KUBELET], frozenset({"kubelet", "scheduler"}))

    assert [("kubelet", "P-KUBELET"), ("scheduler", "P-LOCK")] == [
        (one.group, one.check) for one in chosen
    ]
    # Where only the consequence was chosen, no other line would be wrong.
    (offer,) = concluded([OFFER, replace(KUBELET, check="P-AGENT")], frozenset({"kubelet"}))
    assert ("wrong", OFFER.said) == (offer.verdict, offer.said)


GOOD = Check("state", ok=True)
BAD = Check("stream", ok=False, text="The kubelet is away.")
WEAK = Check("api", ok=False, text="The watch is down.", required=False)


def test_every_required_check_must_hold_and_the_others_degrade():
    assert is_ready([GOOD, WEAK])
    assert is_ready([])
    assert not is_ready([GOOD, BAD])


Case = tuple[Iterable[Finding], list[str]]


def ago(seconds: float) -> dt.datetime:
    return NOON - dt.timedelta(seconds=seconds)


def check(found: Iterable[Finding], expected: list[str]) -> None:
    every = list(found)
    texts = [
        f"{one.check} {one.verdict} {one.subject} {one.said} {one.advice} {one.means} "
        for one in every
    ]

    assert len(expected) == len(every), texts
    for one, text, line in zip(every, texts, expected, strict=True):
        head, *parts = line.split("|")
        assert text.startswith(f"{head} "), text
        assert [] == [part for part in parts if part not in text], text
        assert one.said
        assert one.check in CHECKS, text
        assert "\x1b" not in text, "nothing that a terminal obeys"


SCAN = Scan("570", (a_gpu(),))
FAULTS = (
    GpuFault("index 2", "fell off the bus", Trouble.LOST),
    GpuFault("index 3", "was released", Trouble.RELEASED),
)
MIG = Scan("570", (a_gpu(), a_gpu(mig_enabled=True)), FAULTS)


def driver(scan: Scan | None, failure: str = "", remedy: str = "") -> list[Finding]:
    return list(doctor.judge_driver("NVML", scan, failure, remedy))


HOST: list[Case] = [
    (driver(SCAN), ["P-DRIVER ok|driver 570, 1 GPU: "]),
    (
        driver(MIG),
        [
            "P-DRIVER ok|driver 570, 2 GPUs",
            "P-GPU note|MIG mode",
            "P-GPU wrong|fell off|reboot",
            "P-GPU note|was released|hami-agent recheck",
        ],
    ),
    (driver(Scan("570", ())), ["P-DRIVER wrong|0 GPUs: it describes none"]),
    # Without any GPU that answers, one line tells of all.
    (driver(Scan("570", (), FAULTS)), ["P-DRIVER wrong|0 GPUs|index 2: fell off the bus|released"]),
    (driver(None, "lost", "install it"), ["P-DRIVER wrong|lost install it"]),
]

TWO = tuple(a_registered(f"GPU-{index}", index) for index in range(2))
SICK = tuple(replace(gpu, healthy=False) for gpu in TWO)
REPORT = ClusterNode(NODE, annotations={REGISTER: encode_json(TWO)}, capacity=40)


SIGHTS = {
    "": REPORT,
    "old": replace(REPORT, written=ago(90)),
    "fresh": replace(REPORT, written=ago(5)),
    "14s": replace(REPORT, written=ago(14)),  # the kubelet has 15 s
    "16s": replace(REPORT, written=ago(16)),
    "ill": replace(REPORT, annotations={REGISTER: encode_json(SICK)}),
    "unreadable": replace(REPORT, annotations={REGISTER: "[?"}),
    "none": replace(REPORT, annotations={}),
}


def judged(words: str) -> Iterable[Finding]:
    """What a row of the table looks at: an offer, a handshake, a lock."""
    kind, first, *more = [*words.replace("\\e", "\x1b").split(" "), ""]
    if kind == "lock":
        since = None if first == "?" else ago(float(first))
        return (doctor.judge_lock(NODE, LockStatus(since=since, holder=more[0]), NOON),)
    sight = SIGHTS[more[0]]
    if kind == "offer":
        return (doctor.judge_offer(replace(sight, slices=int(first)), "nvidia.com/gpu", NOON),)
    text = " ".join(more[1:]).strip()
    notes = {**sight.annotations, **({HANDSHAKE: text} if text else {})}
    return (doctor.judge_report(replace(sight, annotations=notes), ReportProfile(first), NOON),)


@pytest.mark.parametrize(("words", "line"), rows_of(__file__, "doctor.txt"))
def test_what_the_scheduler_sees_is_one_line(words: str, line: str):
    check(judged(words), [line])


@pytest.mark.parametrize(("found", "expected"), HOST)
def test_what_the_driver_says_is_one_line_each(found: Iterable[Finding], expected: list[str]):
    check(found, expected)


@pytest.mark.parametrize(
    ("name", "made", "failure", "line"),
    [
        ("there", 1, 0, "P-PATHS ok"),
        ("none", 1, 0, "P-PATHS ok|the agent creates it"),
        ("none/below", 1, errno.EROFS, "P-PATHS wrong|cannot be created: Read-only file system"),
        ("file/x", 1, errno.ENOTDIR, "P-PATHS wrong|cannot be created: Not a directory"),
        ("none", 0, 0, "P-PATHS wrong|does not exist"),
        ("file", 1, 0, "P-PATHS wrong|is no directory"),
        ("loop", 1, 0, "P-PATHS wrong|cannot be looked at: Too many levels"),
        ("open", 1, 0, "P-PATHS wrong|others may write there (uid {}, mode 0707)|chmod 0750"),
        ("theirs", 1, 0, "P-PATHS wrong|others may write there (uid 7, mode 0750)|the sockets"),
        ("there", 1, errno.ENOSPC, "P-PATHS wrong|cannot be written: No space left on device"),
    ],
)
def test_a_directory_is_judged_by_what_is_there(
    name: str, made: int, failure: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if name == "theirs" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    for each, mode in (("there", 0o750), ("open", 0o707), ("theirs", 0o750)):
        (tmp_path / each).mkdir()
        (tmp_path / each).chmod(mode)
    if os.geteuid() == 0:
        os.chown(tmp_path / "theirs", 7, 7)
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setattr(doctor, "write_failure", lambda _: failure)

    check([doctor.judge_path(tmp_path / name, made=bool(made))], [line.format(os.geteuid())])


async def examined(
    flags: dict[str, str], *groups: str, agent: StatusDocument | Finding | None = None
) -> tuple[Finding, ...]:
    settings = make_plan(Sources(flags=flags, host="host")).settings()
    return await doctor.examine(NodeSeen(settings, {}, frozenset(groups), agent))


def failed(name: str, text: str = "is away", *, required: bool = False) -> Check:
    return Check(name, ok=False, text=text, required=required)


def answer(*checks: Check, gpus: tuple[GpuStatus, ...] = (), **node: Any) -> StatusDocument:
    made = (Check("state", ok=True), Check("stream", ok=True), *checks)
    return StatusDocument(node=NodeStatus(name=NODE, checks=made, **node), gpus=gpus)


def gpu(condition: str, **more: Any) -> GpuStatus:
    return GpuStatus(uuid="GPU-1", index=1, condition=condition, **more)


OWN = Path("/proc/self/exe").read_bytes()[:64]
"""The head of a program of this machine, which its loader takes."""
READY = "P-AGENT ok readiness the agent is ready; 2 checks of it passed"
SILENT = Finding("P-AGENT", "wrong", "/s", "no agent answers")


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        (answer(), [READY]),
        # It serves on: the line must not say that no pod gets a GPU.
        (answer(failed("api")), [f"P-AGENT note api is away|{SERVED}", READY]),
        (
            answer(failed("registered", required=True), failed("stream", "no", required=True)),
            [f"P-AGENT wrong registered is away|{NO_OFFER}", "P-AGENT wrong stream no"],
        ),
        (answer(failed("novelty", "", required=True)), ["P-AGENT wrong novelty fails"]),
        # A fault is one line: a driver that is away leaves no GPUs, and nothing is registered.
        (
            answer(
                *(failed(name, required=True) for name in ("inventory", "registered", "stream")),
                *(failed("driver"), failed("gpus"), failed("gpus_answering"), failed("offer")),
            ),
            ["P-DRIVER wrong driver is away"],
        ),
        (answer(failed("cdi", "GPU 2 is in none")), ["P-CDI wrong cdi GPU 2 is in none", READY]),
        (answer(failed("gpus_answering")), ["P-GPU note gpus_answering", READY]),
        (
            answer(
                failed("gpu_health", "GPU 1 is lost"),
                gpus=(gpu("lost", text="it is gone: reboot", action="reboot", serving=False),),
            ),
            ["P-GPU wrong GPU 1 it is lost: it is gone: reboot|pod gets this GPU|--by pod", READY],
        ),
        (
            answer(gpus=(gpu("unmonitored", cause="released", serving=False),)),
            ["P-GPU note GPU 1 it is released: released|no new pod gets this GPU", READY],
        ),
        (
            answer(gpus=(gpu("unmonitored", text="no events"), gpu("ok"))),
            ["P-GPU note GPU 1 it is unmonitored: no events|new pods still get", READY],
        ),
        (
            answer(gpus=(gpu("unmonitored"), replace(gpu("unmonitored"), index=2), gpu("lost"))),
            ["P-GPU note GPUs 1, 2 each is unmonitored: ", "P-GPU wrong GPU 1 it is lost: ", READY],
        ),
        (
            answer(lock=LockStatus(since=None, holder="?")),
            [READY, "P-LOCK wrong|cannot be read (?)"],
        ),
        (SILENT, ["P-DRIVER wrong", "P-AGENT wrong /s no agent answers"]),
    ],
)
async def test_what_the_agent_says_is_told_once(
    agent: StatusDocument | Finding, expected: list[str], monkeypatch: pytest.MonkeyPatch
):
    def none(_):
        raise OSError(errno.EIO, "no driver")

    monkeypatch.setattr(doctor, "open_driver", none)
    found = await examined({"--scheduler": "none"}, "agent", "driver", "scheduler", agent=agent)

    check(found, expected)


@pytest.mark.looptime(False)
@pytest.mark.parametrize(
    ("preload", "library", "modes", "expected"),
    [
        ("{}/vgpu/libvgpu.so\n", "good", (0o644, 0o644), ["P-PRELOAD ok|containers load", "", ""]),
        ("# a\n/opt/x.so {}/vgpu/libvgpu.so", "good", (0o644, 0o644), ["P-PRELOAD ok", "", ""]),
        ("", "good", (0o644, 0o644), [f"P-PRELOAD wrong|names no library|{NO_OFFER}", "", ""]),
        ("{}/vgpu/libvgpu.so\r\n", "good", (0o644, 0o644), ["P-PRELOAD wrong|its only", "", ""]),
        ("{}/vgpu/libvgpu.so", "empty", (0o644, 0o644), ["P-PRELOAD wrong|is empty or", "", ""]),
        ("{}/vgpu/libvgpu.so", None, (0o644, 0o644), ["P-LIBRARY wrong|not installed|HA-5005"]),
        (
            "{}/vgpu/libvgpu.so",
            "good",
            (0o666, 0o640),
            [
                "P-PRELOAD ok",
                "P-PRELOAD wrong|libvgpu.so|others than root may write it|mode 0666",
                "P-PRELOAD wrong|ld.so.preload|not everybody may read it|mode 0640",
            ],
        ),
    ],
)
async def test_what_containers_load_is_judged_by_the_rule_of_the_agent(
    tmp_path: Path, preload: str, library: str | None, modes: tuple[int, int], expected: list[str]
):
    (tmp_path / "vgpu").mkdir()
    files = tmp_path / "vgpu/libvgpu.so", tmp_path / "vgpu/ld.so.preload"
    files[1].write_text(preload.format(tmp_path))
    if library is not None:
        files[0].write_bytes(OWN if library == "good" else b"")
    for file, mode in zip(files, modes, strict=True):
        if file.exists():
            file.chmod(mode)
    found = await examined({"--hook-path": str(tmp_path)}, "library")

    check(found, [line or "P-PRELOAD ok" for line in expected])


def test_rights_are_asked_for_this_node_and_by_the_name_of_a_pod():
    asked, more = rights(NODE), rights(NODE, node_condition=True)

    assert {NODE} == {right.name for right in asked if right.resource == "nodes"}
    assert {Right("patch", "nodes/status", name=NODE)} == set(more) - set(asked)
