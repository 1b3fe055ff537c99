"""`hami-agent status`: what people see, from a document of the agent, at any width."""

import datetime as dt
import itertools
import json

import msgspec
import pytest
import yaml

from agent.cli import sources
from agent.cli.main import dispatch
from agent.cli.status import StatusStyle, entry_lines, pod_lines, spark, status_lines
from agent.status import (
    AllocationStatus,
    CheckStatus,
    Entry,
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
REFUSED = Entry(at=NOON - HOUR, reason="HA-2005", text="there is no lock", pod="web", namespace="n")
STATUS = StatusDocument(
    node=NODE,
    gpus=(WELL, BAD),
    allocations=(HELD,),
    refusals=(REFUSED,),
    changes=(),
    journal_since=NOON - 76 * HOUR,
)


def shown(found=STATUS, **style):
    return "\n".join(status_lines(found, NOON, StatusStyle(**style)))


def test_the_first_screen_says_who_is_ill_and_what_to_do():
    text = shown(width=100)

    assert "gpu-a07  READY · agent 0.3.0 up 3d04h · driver 570.148 · kubelet: registered" in text
    assert (
        "GPU 1 bad for 4m: XID 79: the GPU has fallen off the bus [H-079]; action: reboot" in text
    )
    assert "3 of 20 slices in use, 1 of 2 GPUs not offered" in text
    assert "refused: 1 in 24 h, the last 1h00m ago: there is no lock [HA-2005]" in text
    (line,) = (line for line in text.splitlines() if line.startswith("0 "))
    assert ["3/10", "48.0G", "143.4G", "33/100%", "41.2G", "71%"] == line.split()[-6:]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width):
    lines = [
        *status_lines(STATUS, NOON, StatusStyle(width)),
        *pod_lines((HELD,), NOON, StatusStyle(width)),
        *entry_lines("refusals", (REFUSED,), NOON, StatusStyle(width)),
    ]

    assert width >= max(map(len, lines))
    assert any(line.startswith("1 ") and "BAD" in line for line in lines)


def test_the_head_is_at_most_80_columns_wide_also_where_the_table_is_wider():
    node = msgspec.structs.replace(NODE, kubelet="registered, and the kubelet takes the lists")
    found = msgspec.structs.replace(STATUS, node=node)
    head = list(
        itertools.takewhile(lambda line: line[:3] != "GPU", shown(found, width=120).split("\n"))
    )

    assert 80 >= max(map(len, head))
    assert "  kubelet: registered, and the kubelet takes the lists" in head


IDLE = msgspec.structs.replace(HELD, last_kernel=NOON - 50 * HOUR)
LATE = msgspec.structs.replace(HELD, pod="train-1", last_kernel=NOON - HOUR)
BUSY = msgspec.structs.replace(HELD, pod="train-2", last_kernel=NOON - dt.timedelta(minutes=59))
TWO_IDLE = (
    "idle: 2 containers have run no kernel for over an hour; the longest is llm/train-0/main, 2d02h"
)
FULL = CheckStatus(name="state", ok=False, text="the disk is full")
DOWN = CheckStatus(name="api", ok=False, required=False, text="the watch is down")


@pytest.mark.parametrize(
    ("node", "parts", "words", "unsaid"),
    [
        (
            *({}, {"allocations": (LATE, BUSY, IDLE)}),
            f"{TWO_IDLE}; `hami-agent status --by pod` lists all",
            "it is llm",
        ),
        (
            *({}, {"allocations": (IDLE, BUSY)}),
            "idle: 1 container has run no kernel for over an hour; it is llm/train-0/main",
            "longest",
        ),
        ({}, {"allocations": (BUSY, HELD)}, "3 of 20 slices", "idle"),
        ({"ready": False}, {}, "NOT READY", "by its objects"),
        ({"checks": (FULL,)}, {}, "not ready: state: the disk is full", "degraded"),
        ({"checks": (DOWN,)}, {}, "degraded: api: the watch is down", "not ready"),
        (
            *({"lock": LockStatus(since=NOON - dt.timedelta(seconds=4), holder="llm/train-7")}, {}),
            "lock  held by llm/train-7 for 4s",
            "nobody",
        ),
        ({"memory_scaling": None}, {}, "cores x1", "memory x"),
        (
            *({}, {"gpus": (msgspec.structs.replace(WELL, cordoned=True),)}),
            "`hami-agent uncordon 0 --node gpu-a07` ends it",
            "BAD",
        ),
    ],
)
def test_what_needs_attention_is_said_and_nothing_else(node, parts, words, unsaid):
    about = msgspec.structs.replace(NODE, **node)
    text = shown(msgspec.structs.replace(STATUS, node=about, **parts), width=200)

    assert (True, False) == (words in text, unsaid in text)


def test_what_a_container_uses_stands_beside_what_it_may_use():
    share = msgspec.structs.replace(HELD.shares[0], used_mib=8192, gpu_percent=17)
    used = msgspec.structs.replace(HELD, shares=(share,), last_kernel=NOON - 2 * HOUR)
    dark = msgspec.structs.replace(HELD, unkept="HAMi-core is out", unread="its file is a link")

    head, line, unknown, limits, note = pod_lines((used, dark), NOON, StatusStyle(width=160))

    assert ["MEMORY", "USED", "CORES", "UTIL", "IDLE"] == head.split()[4:9]
    assert ["32.0G", "8.0G", "20%", "17%", "2h00m"] == line.split()[4:9]
    assert ["32.0G", "-", "20%", "-", "-"] == unknown.split()[4:9]
    assert "nothing keeps the limits of llm/train-0/main: HAMi-core is out" == limits
    assert "the use of llm/train-0/main is not known: its file is a link" == note


def test_ascii_is_ascii():
    assert shown(ascii=True, width=60).isascii()


def test_a_name_with_escapes_reaches_no_terminal():
    evil = msgspec.structs.replace(HELD, pod="\x1b[2Jx", namespace="a\nb")
    entry = msgspec.structs.replace(REFUSED, pod="\x1b]0;x\x07", text="\x1b[31mred")
    style = StatusStyle(100)
    text = "\n".join([*pod_lines((evil,), NOON, style), *entry_lines("x", (entry,), NOON, style)])

    assert "\x1b" not in text
    assert "\x07" not in text
    assert 4 == len(text.splitlines())


def test_the_history_is_one_block_for_two_values():
    assert " ▁▄█" == spark([None, None, 0, 0, 50, None, 100, 10], plain=False)
    assert " .*#".isascii()
    assert spark([100, 100], plain=True).isascii()


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

    monkeypatch.setattr(sources, "call", call)
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


def test_names_are_for_scripts_and_json_has_a_short_form(cli, agent):
    assert "Status" == json.loads(cli("status", "--json")[1])["kind"]
    assert f"gpu/{G1}\ngpu/{G2}\n" == cli("status", "-o", "name")[1]
    assert "pod/llm/train-0\n" == cli("status", "-o", "name", "--by", "pod")[1]


def test_one_gpu_is_shown_with_its_pods(cli, agent):
    out = cli("status", "0")[1]

    assert "train-0" in out
    assert "XID 79" not in out
    assert "train-0" not in cli("status", G2)[1]


def test_an_unknown_gpu_is_answered_with_the_known_ones(cli, agent):
    code, out, err = cli("status", "7")

    assert (4, "") == (code, out)
    assert "no GPU is named 7; GPUs: 0, 1" in err
    assert f"did you mean {G1}?" in cli("status", G1[:-2] + "00")[2]


def test_what_happened_is_shown_as_far_back_as_asked(cli, agent):
    out = cli("status", "--since", "2h")[1]
    assert "HA-2005 n/web: there is no lock" in out
    assert "refusals: none" in cli("status", "--since", "30m")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--since", "yesterday"], "'yesterday' is not a duration"),
        (["--since", "99999999999999h"], "longer than 24h"),
        (["--from", "node.tgz", "--node", "a"], "not allowed with"),
    ],
)
def test_a_wrong_option_is_a_mistake_of_usage(cli, words, said):
    code, _, err = cli("status", *words)

    assert (2, True) == (code, said in err)


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
        monkeypatch.setattr(sources, "call", lambda *_: answer)
    socket = str(tmp_path / "no.sock") if answer is None else "/x"
    code, out, err = cli("status", "--since", "24h", "--socket", socket)

    assert (3, "", True) == (code, out, said in err)


@pytest.mark.parametrize("verb", ["status", "bundle", "recheck 0", "release 0", "simulate list"])
def test_an_escape_in_an_argument_does_not_reach_the_terminal(verb, tmp_path, capsys):
    first, *rest = verb.split()
    socket = ["--socket", str(tmp_path / "\x1b[31m")]
    words = [first, *socket, *rest] if first == "simulate" else [first, *rest, *socket]

    assert 3 == dispatch(words, {})
    assert "\N{REPLACEMENT CHARACTER}[31m" in (err := capsys.readouterr().err)
    assert "\x1b" not in err
