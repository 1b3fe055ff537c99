"""A fault is one line: what follows from it is left out. Readiness.

What `doctor` makes of what it saw, check by check: each fault, and that a note is none.

A case is the findings and a line for each: id, verdict and what its text must say, after bars.
"""

import ast
import datetime as dt
import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
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


@pytest.mark.parametrize(("words", "line"), rows_of(__file__, "paths.txt"))
def test_a_directory_is_judged_by_what_is_there(words, line, tmp_path, monkeypatch):
    name, *more = words.split()
    failure = next((getattr(errno, word) for word in more if word.isupper()), 0)
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

    found = doctor.judge_path(tmp_path / name, made="given" not in more)
    check([found], [line.format(os.geteuid())])


async def examined(
    flags: dict[str, str], *groups: str, agent: StatusDocument | Finding | None = None
) -> tuple[Finding, ...]:
    settings = make_plan(Sources(flags=flags, host="host")).settings()
    return await doctor.examine(NodeSeen(settings, {}, frozenset(groups), agent))


OWN = Path("/proc/self/exe").read_bytes()[:64]
"""The head of a program of this machine, which its loader takes."""
WORDS = {"{READY}": "P-AGENT ok readiness the agent is ready; 2 checks of it passed"}
WORDS |= {"{SERVED}": SERVED, "{NO_OFFER}": NO_OFFER}


def answer(words: str) -> StatusDocument | Finding:
    """What the agent says, in the words of a row."""
    checks, gpus, lock = [Check("state", ok=True), Check("stream", ok=True)], [], None
    for part in words.split(" & "):
        kind, name, text = [*part.split(" ", 2), "", ""][:3]
        if kind in {"fails", "requires"}:
            checks.append(Check(name, ok=False, text=text, required=kind == "requires"))
        elif kind == "gpu":
            index, _, condition = name.partition(":")
            said = GpuStatus(uuid="GPU-1", index=int(index), condition=condition)
            gpus.append(replace(said, **yaml.safe_load(text or "{}")))
        elif kind == "lock":
            lock = LockStatus(since=None, holder=name)
        elif kind == "silent":
            return Finding("P-AGENT", "wrong", "/s", "no agent answers")
    node = NodeStatus(name=NODE, checks=tuple(checks), lock=lock)
    return StatusDocument(node=node, gpus=tuple(gpus))


@pytest.mark.parametrize(("words", "told"), rows_of(__file__, "agent.txt"))
async def test_what_the_agent_says_is_told_once(words, told, monkeypatch):
    def none(_):
        raise OSError(errno.EIO, "no driver")

    monkeypatch.setattr(doctor, "open_driver", none)
    groups = "agent", "driver", "scheduler"
    found = await examined({"--scheduler": "none"}, *groups, agent=answer(words))
    for word, text in WORDS.items():
        told = told.replace(word, text)

    check(found, told.split(" & "))


@pytest.mark.looptime(False)
@pytest.mark.parametrize(("words", "expected"), rows_of(__file__, "library.txt"))
async def test_what_containers_load_is_judged_by_the_rule_of_the_agent(tmp_path, words, expected):
    preload, library, *modes = words.split(" | ")
    (tmp_path / "vgpu").mkdir()
    files = tmp_path / "vgpu/libvgpu.so", tmp_path / "vgpu/ld.so.preload"
    files[1].write_text(ast.literal_eval(f'"{preload}"').format(tmp_path))
    if library != "no library":
        files[0].write_bytes(OWN if library == "good" else b"")
    for file, mode in zip(files, modes or ("644", "644"), strict=True):
        if file.exists():
            file.chmod(int(mode, 8))
    found = await examined({"--hook-path": str(tmp_path)}, "library")

    check(found, expected.replace("{NO_OFFER}", NO_OFFER).split(" & "))


def test_rights_are_asked_for_this_node_and_by_the_name_of_a_pod():
    asked, more = rights(NODE), rights(NODE, node_condition=True)
    assert {NODE} == {right.name for right in asked if right.resource == "nodes"}
    assert {Right("patch", "nodes/status", name=NODE)} == set(more) - set(asked)
