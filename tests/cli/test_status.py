"""`hami-agent status`: what people see, from a document of the agent, at any width."""

import datetime as dt
import itertools
import json

import msgspec
import pytest
import yaml

from agent.cli import sources
from agent.cli.main import dispatch
from agent.cli.output import terminal_width
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


def test_who_holds_a_gpu_idle_is_pointed_out_with_the_longest():
    share = msgspec.structs.replace(HELD.shares[0], used_mib=512, gpu_percent=0)
    days, minutes = NOON - 50 * HOUR, NOON - dt.timedelta(minutes=59)
    idle = msgspec.structs.replace(HELD, shares=(share,), last_kernel=days)
    late = msgspec.structs.replace(idle, pod="train-1", last_kernel=NOON - HOUR)
    busy = msgspec.structs.replace(idle, pod="train-2", last_kernel=minutes)

    def noted(*held):
        return shown(msgspec.structs.replace(STATUS, allocations=held), width=200)

    assert (
        "idle: 2 containers have run no kernel for over an hour; the longest is "
        "llm/train-0/main, 2d02h; `hami-agent status --by pod` lists all"
    ) in noted(late, busy, idle)
    assert "idle: 1 container has run no kernel for over an hour; it is llm/tr" in noted(idle, busy)
    assert "idle" not in noted(busy, HELD)


def test_what_a_container_uses_stands_beside_what_it_may_use():
    share = msgspec.structs.replace(HELD.shares[0], used_mib=8192, gpu_percent=17)
    used = msgspec.structs.replace(HELD, shares=(share,), last_kernel=NOON - 2 * HOUR)
    dark = msgspec.structs.replace(HELD, unread="its file is a link")

    head, line, unknown, note = pod_lines((used, dark), NOON, StatusStyle(width=160))

    assert ["MEMORY", "USED", "CORES", "UTIL", "IDLE"] == head.split()[4:9]
    assert ["32.0G", "8.0G", "20%", "17%", "2h00m"] == line.split()[4:9]
    assert ["32.0G", "-", "20%", "-", "-"] == unknown.split()[4:9]
    assert "the use of llm/train-0/main is not known: its file is a link" == note


def test_what_nothing_limits_is_told_below_the_table():
    free = msgspec.structs.replace(HELD, unkept="HAMi-core is out", unread="its file is a link")

    *_, limits, use = pod_lines((HELD, free), NOON, StatusStyle(width=160))

    assert "nothing keeps the limits of llm/train-0/main: HAMi-core is out" == limits
    assert "the use of llm/train-0/main is not known: its file is a link" == use


def test_ascii_is_ascii():
    assert shown(ascii=True, width=60).isascii()


def test_a_check_that_fails_is_shown_with_what_to_do():
    checks = (
        CheckStatus(name="state", ok=False, text="the disk is full"),
        CheckStatus(name="api", ok=False, required=False, text="the watch is down"),
    )
    node = msgspec.structs.replace(NODE, ready=False, checks=checks)
    text = shown(msgspec.structs.replace(STATUS, node=node))

    assert "NOT READY" in text
    assert "not ready: state: the disk is full" in text
    assert "degraded: api: the watch is down" in text


def test_a_lock_is_shown_with_its_holder_and_age():
    lock = LockStatus(since=NOON - dt.timedelta(seconds=4), holder="llm/train-7")
    node = msgspec.structs.replace(NODE, lock=lock)

    assert "lock  held by llm/train-7 for 4s" in shown(msgspec.structs.replace(STATUS, node=node))


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


def test_json_has_a_short_form_as_with_every_verb(cli, agent):
    code, out, _ = cli("status", "--json")

    assert (0, "Status") == (code, json.loads(out)["kind"])


def test_names_are_for_scripts(cli, agent):
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

    code, _, err = cli("status", "--since", "yesterday")
    assert (2, True) == (code, "'yesterday' is not a duration" in err)


def test_without_an_agent_the_exit_code_is_3_and_the_message_names_the_socket(cli, tmp_path):
    code, out, err = cli("status", "--socket", str(tmp_path / "no.sock"))

    assert (3, "") == (code, out)
    assert "no.sock does not answer" in err


@pytest.mark.parametrize(
    "made",
    ["2026-11-25T22:00:00", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59-23:59"],
    ids=["without-offset", "first-year", "past-the-last-year"],
)
def test_a_time_that_no_agent_writes_is_not_read(cli, monkeypatch, made):
    document = json.loads(envelope("Status", StatusDocument(node=NODE, gpus=()), NOON))
    answer = json.dumps({**document, "generatedAt": made})
    monkeypatch.setattr(sources, "call", lambda *_: (200, answer))
    code, _, err = cli("status", "--since", "24h")

    assert (3, True) == (code, "did not answer as an agent" in err)


def test_a_scale_that_is_not_known_is_left_out():
    node = msgspec.structs.replace(NODE, memory_scaling=None)
    text = "\n".join(status_lines(StatusDocument(node=node, gpus=()), NOON, StatusStyle()))

    assert ("memory x" in text, "cores x1" in text) == (False, True)


def test_two_sources_at_once_are_wrong_usage(cli):
    code, _, err = cli("status", "--from", "node.tgz", "--node", "a")

    assert (2, True) == (code, "not allowed with" in err)


def test_more_than_the_agent_keeps_cannot_be_asked_for(cli):
    code, _, err = cli("status", "--since", "99999999999999h")

    assert (2, True) == (code, "longer than 24h" in err)


@pytest.mark.parametrize("columns", ["9" * 5000, "-1", "wide"])
def test_a_width_that_no_terminal_has_counts_as_none(columns):
    assert 120 == terminal_width({"COLUMNS": columns})


def test_a_stranger_at_the_socket_is_not_taken_for_an_agent(cli, monkeypatch):
    monkeypatch.setattr(sources, "call", lambda *_: (200, "<html>"))
    code, _, err = cli("status", "--socket", "/x")
    assert (3, True) == (code, "/x did not answer as an agent" in err)

    monkeypatch.setattr(sources, "call", lambda *_: (503, "This agent stands by"))
    code, _, err = cli("status", "--socket", "/x")
    assert (3, True) == (code, "This agent stands by" in err)


@pytest.mark.parametrize("verb", ["status", "bundle", "recheck 0", "release 0", "simulate list"])
def test_an_escape_in_an_argument_does_not_reach_the_terminal(verb, tmp_path, capsys):
    first, *rest = verb.split()
    socket = ["--socket", str(tmp_path / "\x1b[31m")]
    words = [first, *socket, *rest] if first == "simulate" else [first, *rest, *socket]

    assert 3 == dispatch(words, {})
    assert "\N{REPLACEMENT CHARACTER}[31m" in (err := capsys.readouterr().err)
    assert "\x1b" not in err


def test_a_cordoned_gpu_is_told_with_the_command_that_ends_it():
    cordoned = msgspec.structs.replace(WELL, cordoned=True)
    lines = status_lines(StatusDocument(node=NODE, gpus=(cordoned,)), NOON, StatusStyle(200))

    assert any("`hami-agent uncordon 0 --node gpu-a07` ends it" in line for line in lines)
