"""`hami-agent status`: what people see, from a document of the agent, at any width."""

import datetime as dt
import json
from pathlib import Path

import msgspec
import pytest
import yaml

from agent.cli import status
from agent.cli.main import dispatch
from agent.cli.status import StatusStyle, entry_lines, pod_lines, status_lines
from agent.ledger import JournalEntry
from agent.node import Check
from agent.status import (
    AllocationStatus,
    GpuStatus,
    LockStatus,
    NodeStatus,
    ShareStatus,
    StatusDocument,
    envelope,
)
from tests.builders import G1, G2, NOON

HOUR = dt.timedelta(hours=1)
NODE = NodeStatus(
    name="gpu-a07",
    version="0.3.0",
    started_at=NOON - 76 * HOUR,
    ready=True,
    driver="570.148",
    kubelet="registered",
    resource="nvidia.com/gpu",
    split_count=10,
    memory_scaling=1.8,
    core_scaling=1.0,
)
WELL = GpuStatus(
    uuid=G1,
    index=0,
    model="NVIDIA H100 80GB HBM3",
    condition="ok",
    slices=10,
    slices_held=3,
    memory_mib=81559,
    sellable_mib=146806,
    promised_mib=49152,
    sellable_cores=100,
    promised_cores=33,
    used_mib=42188,
    gpu_percent=71,
)
BAD = GpuStatus(
    uuid=G2,
    index=1,
    condition="bad",
    serving=False,
    since=NOON - dt.timedelta(minutes=4),
    cause="xid",
    action="reboot",
    text="XID 79: the GPU has fallen off the bus [H-079]",
    slices=10,
)
HELD = AllocationStatus(
    namespace="llm",
    pod="train-0",
    container="main",
    shares=(ShareStatus(gpu="0", uuid=G1, memory_mib=32768, cores=20),),
    since=NOON - HOUR,
    confirmed=True,
)
REFUSED = JournalEntry(
    at=NOON - HOUR, reason="HA-2005", text="there is no lock", pod="web", namespace="n"
)
STATUS = StatusDocument(
    node=NODE,
    gpus=(WELL, BAD),
    allocations=(HELD,),
    refusals=(REFUSED,),
    changes=(),
    journal_since=NOON - 76 * HOUR,
)


def holding(*allocations):
    return msgspec.structs.replace(STATUS, allocations=allocations)


def shown(found=STATUS, **style):
    return "\n".join(status_lines(found, NOON, StatusStyle(**style)))


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width):
    lines = [
        *status_lines(STATUS, NOON, StatusStyle(width)),
        *pod_lines(holding(HELD), NOON, StatusStyle(width)),
        *entry_lines("refusals", (REFUSED,), NOON, StatusStyle(width)),
    ]

    assert width >= max(map(len, lines))
    assert any(line.startswith("1 ") and "BAD" in line for line in lines)


STILL = (msgspec.structs.replace(HELD.shares[0], used_mib=8192, gpu_percent=0),)
IDLE = msgspec.structs.replace(HELD, shares=STILL, last_kernel=NOON - 50 * HOUR)
LATE = msgspec.structs.replace(HELD, pod="train-1", last_kernel=NOON - HOUR)
BUSY = msgspec.structs.replace(HELD, pod="train-2", last_kernel=NOON - dt.timedelta(minutes=59))
FULL = Check(name="state", ok=False, text="the disk is full")
SAID = Check("offer", ok=False, text="no slice is on offer: the disk is full", required=False)
DOWN = Check(name="api", ok=False, required=False, text="the watch is down")


USED = msgspec.structs.replace(
    HELD,
    shares=(msgspec.structs.replace(HELD.shares[0], used_mib=8192, gpu_percent=17),),
    last_kernel=NOON - 2 * HOUR,
)
DARK = msgspec.structs.replace(
    HELD, confirmed=False, unkept="HAMi-core is out", unread="its file is a link"
)
ENDED = msgspec.structs.replace(HELD, pod="gone", ended=True, mismatched=True)
MOVED = msgspec.structs.replace(HELD, mismatched=True)
ILL = StatusDocument(
    node=msgspec.structs.replace(
        NODE,
        ready=False,
        observe=True,
        kubelet="registered, and the kubelet takes the lists",
        profiles=("h100-pool", "test"),
        memory_scaling=None,  # not known
        lock=LockStatus(since=NOON - dt.timedelta(seconds=4), holder="llm/train-7"),
        checks=(FULL, SAID, DOWN, Check(name="gpu_health", ok=False, text="GPU 1 is bad")),
    ),
    gpus=(
        msgspec.structs.replace(WELL, cordoned=True, pci="0000:10:00.0", numa=1),
        BAD,
        GpuStatus(uuid="GPU-x", condition="ok", obstacles=(SAID.text,)),
    ),
    allocations=(LATE, BUSY, IDLE, DARK),
)
WIDE = StatusStyle(80, wide=True)
GOLDEN = Path("tests/golden/status.txt")

changed = msgspec.structs.replace
WITHHELD = [changed(WELL, index=index, obstacles=("it is withheld",)) for index in (0, 2, 3)]
SEVERAL = changed(STATUS, gpus=(*WITHHELD, changed(BAD, index=4), changed(BAD, index=5), BAD))
AGAIN = [changed(REFUSED, pod=f"web-{number}") for number in range(3)]
OTHER = changed(REFUSED, text="its GPU is bad")
STANDING = changed(STATUS, refusals=(REFUSED, OTHER), standing=(OTHER,))
EVIL = changed(HELD, pod="\x1b[2Jx", namespace="a\nb")
ODD = changed(REFUSED, pod="\x1b]0;x\x07", text="\x1b[31mred")
PAINTED = StatusStyle(80, paint=lambda text, colour: f"<{colour}>{text}</>")


def golden_text():
    """What `status` says. `python -m tests.cli.test_status` writes it."""
    screens = {
        "a node with a bad GPU": status_lines(STATUS, NOON, StatusStyle(80)),
        "an ill node": status_lines(ILL, NOON, StatusStyle(80)),
        "its GPUs with all columns": list(status_lines(ILL, NOON, WIDE))[5:9],
        "a node without GPUs": status_lines(
            StatusDocument(node=NodeStatus(name="n"), gpus=()), NOON, StatusStyle()
        ),
        "containers": pod_lines(holding(USED, DARK, ENDED, MOVED), NOON, StatusStyle(160)),
        "containers at 80 columns": pod_lines(holding(USED, DARK), NOON, StatusStyle(80)),
        "no container": pod_lines(holding(), NOON, StatusStyle()),
        "refusals": entry_lines("refusals", (REFUSED,), NOON, StatusStyle()),
        "several GPUs of which the same is said": status_lines(SEVERAL, NOON, StatusStyle(200)),
        "colours": status_lines(ILL, NOON, PAINTED),
        "refusals of pods that are there": status_lines(STANDING, NOON, StatusStyle()),
        "without such": status_lines(changed(STATUS, standing=()), NOON, StatusStyle()),
        "equal refusals": entry_lines("refusals", (REFUSED, *AGAIN, REFUSED), NOON, StatusStyle()),
        "one that computes, one that idles": pod_lines(holding(USED, IDLE), NOON, StatusStyle(120)),
        "a name with escapes": pod_lines(holding(EVIL), NOON, StatusStyle(100)),
        "a text with escapes": entry_lines("x", (ODD,), NOON, StatusStyle(100)),
    }
    return "".join(
        f"=== {name}\n" + "".join(f"{line}\n" for line in lines) for name, lines in screens.items()
    )


def test_what_people_see_is_as_it_was():
    assert GOLDEN.read_text(encoding="utf-8") == golden_text()


@pytest.mark.parametrize(
    ("changes", "mib"),
    [
        ({}, 146806 - 49152),
        ({"serving": False}, 0),
        ({"cordoned": True}, 0),
        ({"slices_held": 10}, 0),
        ({"promised_cores": 100}, 0),
        ({"promised_mib": 150000}, 0),
    ],
)
def test_what_is_free_can_be_given_to_a_new_pod(changes, mib):
    assert mib == msgspec.structs.replace(WELL, **changes).free_mib


@pytest.fixture
def cli(capsys):
    """Runs a command line: exit code, standard output, standard error."""

    def run(*argv):
        code = dispatch(argv, {"COLUMNS": "100"})
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def agent(monkeypatch):
    """An agent at the socket that answers with STATUS."""
    asked = []

    def call(path, method, target, _deadline):
        asked.append((str(path), method, target))
        return 200, envelope("Status", STATUS, NOON).decode()

    monkeypatch.setattr(status, "call", call)
    return asked


def test_json_and_yaml_have_the_same_data_and_name_their_source(cli, agent):
    code, out, _ = cli("status", "-o", "json", "--socket", "/x/api.sock")
    document = json.loads(out)

    assert (0, "hami-agent/v1", "Status", "/x/api.sock") == (
        code,
        document["apiVersion"],
        document["kind"],
        document["source"],
    )
    assert "train-0" == document["data"]["allocations"][0]["pod"]
    _, out, _ = cli("status", "-o", "yaml", "--socket", "/x/api.sock")
    assert document == yaml.safe_load(out)
    assert [("/x/api.sock", "GET", "/api/v1/status")] * 2 == agent


def test_what_happened_is_shown_as_far_back_as_asked(cli, agent):
    out = cli("status", "--since", "2h")[1]
    assert "HA-2005 n/web: there is no lock" in out
    assert 1 == out.count("there is no lock"), "not among what needs attention too"
    assert "refusals: none" in cli("status", "--since", "30m")[1]
    assert "known since" not in out


def test_an_agent_that_started_later_says_since_when_it_knows_what_happened(cli, monkeypatch):
    young = msgspec.structs.replace(STATUS, journal_since=NOON - HOUR)
    answer = envelope("Status", young, NOON).decode()
    monkeypatch.setattr(status, "call", lambda *_: (200, answer))
    out = cli("status", "--by", "pod", "--since", "2h")[1]

    assert out.startswith("NAMESPACE")
    assert "(known since 2026-09-01T11:00:00Z; the agent's log has earlier ones)" in out


def an_answer_of(made):
    document = json.loads(envelope("Status", StatusDocument(node=NODE, gpus=()), NOON))
    return 200, json.dumps({**document, "generatedAt": made})


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (an_answer_of("2026-11-25T22:00:00"), "/x did not answer as an agent"),  # no offset
        (an_answer_of("0001-01-01T00:00:00Z"), "/x did not answer as an agent"),
        (an_answer_of("9999-12-31T23:59:59-23:59"), "/x did not answer as an agent"),
        ((200, "<html>"), "/x did not answer as an agent"),
        ((503, "This agent stands by"), "This agent stands by"),
        (None, "no.sock does not answer"),
    ],
)
def test_without_an_agent_the_exit_code_is_3_and_the_message_names_the_socket(
    cli, monkeypatch, tmp_path, answer, said
):
    if answer is not None:
        monkeypatch.setattr(status, "call", lambda *_: answer)
    socket = str(tmp_path / "no.sock") if answer is None else "/x"
    code, out, err = cli("status", "--since", "24h", "--socket", socket)

    assert (3, "", True) == (code, out, said in err)


if __name__ == "__main__":
    GOLDEN.write_text(golden_text(), encoding="utf-8")
