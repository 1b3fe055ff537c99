"""`hami-agent status`: what people see, from a document of the agent, at any width."""

import datetime as dt
import json

import msgspec
import pytest
import yaml
from msgspec.structs import replace as changed

from agent.cli import status
from agent.cli.main import dispatch
from agent.cli.status import StatusStyle, entry_lines, pod_lines, status_lines
from agent.status import NodeStatus, StatusDocument, envelope
from tests.builders import NOON
from tests.recorded import FOLDER, golden

HOUR = dt.timedelta(hours=1)
DOCUMENTS = msgspec.json.decode(
    (FOLDER / "status.json").read_bytes(), type=dict[str, StatusDocument]
)
STATUS = DOCUMENTS["a node with a bad GPU"]
(REFUSED,) = STATUS.refusals or ()
COOLING = tuple(
    changed(STATUS.gpus[1], uuid=f"GPU-{n}", index=n, cooled_at=NOON + dt.timedelta(seconds=left))
    for n, left in enumerate((425, 425, 30, 0))
)
"""The cool-down of the last one is over; its probes may not have passed."""
BARE = StatusDocument(node=NodeStatus(name="n"), gpus=())


def pods(found, width):
    return pod_lines(found, NOON, StatusStyle(width))


def entries(found, width=80):
    return entry_lines("refusals", found.refusals or (), NOON, StatusStyle(width))


def screen(found, width=80, **style):
    return list(status_lines(found, NOON, StatusStyle(width, **style)))


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width):
    lines = [*screen(STATUS, width), *pods(STATUS, width), *entries(STATUS, width)]

    assert width >= max(map(len, lines))
    assert any(line.startswith("1 ") and "BAD" in line for line in lines)


def screens():
    """What `status` says."""
    ill, held = DOCUMENTS["an ill node"], DOCUMENTS["containers"]
    several, standing = "several GPUs of which the same is said", "refusals of pods that are there"
    idle, escapes = "one that computes, one that idles", "a name with escapes"
    found = {
        "a node with a bad GPU": screen(STATUS),
        "an ill node": screen(ill),
        "its GPUs with all columns": screen(ill, wide=True)[5:9],
        "a node without GPUs": screen(BARE),
        "containers": pods(held, 160),
        "containers at 80 columns": pods(changed(held, allocations=held.allocations[:2]), 80),
        "no container": pods(BARE, 80),
        "refusals": entries(STATUS),
        several: screen(DOCUMENTS[several], 200),
        "colours": screen(ill, paint=lambda text, colour: f"<{colour}>{text}</>"),
        standing: screen(DOCUMENTS[standing]),
        "without such": screen(changed(STATUS, standing=())),
        "cool-downs": screen(changed(STATUS, gpus=COOLING, standing=())),
        "equal refusals": entries(DOCUMENTS["equal refusals"]),
        idle: pods(DOCUMENTS[idle], 120),
        escapes: pods(DOCUMENTS[escapes], 100),
        "a text with escapes": entries(DOCUMENTS["a text with escapes"]),
    }
    return "".join(
        f"=== {name}\n" + "".join(f"{line}\n" for line in lines) for name, lines in found.items()
    )


def test_what_people_see_is_as_it_was():
    assert golden("status.txt", screens()) == screens()


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
    assert mib == changed(STATUS.gpus[0], **changes).free_mib


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
    young = changed(STATUS, journal_since=NOON - HOUR)
    answer = envelope("Status", young, NOON).decode()
    monkeypatch.setattr(status, "call", lambda *_: (200, answer))
    out = cli("status", "--by", "pod", "--since", "2h")[1]

    assert out.startswith("NAMESPACE")
    assert "(known since 2026-09-01T11:00:00Z; the agent's log has earlier ones)" in out


def an_answer_of(made):
    document = json.loads(envelope("Status", BARE, NOON))
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
