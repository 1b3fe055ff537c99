"""`--node` of status and doctor: a node of the cluster, in its agent's pod or by its objects."""

import json
import re
import shlex
from pathlib import Path
from typing import Any, cast

import pytest

from agent.hami.annotations import encode_stamp
from agent.status import NodeStatus, StatusDocument, envelope
from tests.builders import NOON
from tests.fakes.explain_rig import ExplainRig, a_gpu, explain_rig
from tests.recorded import golden_part, parts

pytestmark = pytest.mark.looptime(False)

FILE = "status-cluster.txt"
TOLD = parts(FILE)


def arrange(rig: ExplainRig, word: str, name: str, *rest: Any) -> None:
    """What a line `> word name ...` of the golden file prepares."""
    match word:
        case "node":  # with GPUs; a mark: it is bad
            gpus = (a_gpu(one[:5], n, healthy="!" not in one) for n, one in enumerate(rest))
            rig.node(name, *gpus)
        case "note":
            rig.annotate_node(name, dict([rest]))
        case "holder":
            rig.holder(name, *rest[:2], *map(int, rest[2:]))
        case "over":
            rig.edit_pod(name, {"status": {"phase": "Succeeded"}})
        case "lock":
            rig.lock_node(name, *rest)
        case "condition":
            condition = {"type": "GpuDegraded", "status": "True", "message": rest[0]}
            node = rig.store.get("nodes", "", name)
            node["status"]["conditions"] = [condition]
        case "nameless":
            rig.store.get(rest[0], rest[1], name)["metadata"]["uid"] = ""
        case _:
            event = {
                "metadata": {"name": f"a.{rig.store.version}", "namespace": "default"},
                "involvedObject": {"kind": "Node", "name": "a"},
                "source": {"component": name},
                "type": "Warning",
                "reason": rest[1],
                "message": rest[2],
                "lastTimestamp": encode_stamp(rig.now(-float(rest[0]))),
            }
            rig.store.create("events", event)


async def screen(name: str, folder: Path, capsys: Any) -> str:
    """The part of the golden file: what it prepares, the command, and what that prints.

    What differs from run to run is left out.
    """
    lines = [line for line in TOLD[name].splitlines() if re.match("[>$] ", line)]
    allowed = [tuple(one.split()) for one in re.findall("^> may (.*)$", TOLD[name], re.MULTILINE)]
    async with explain_rig(folder, capsys, cast("Any", frozenset(allowed) or None)) as rig:
        for line in lines[:-1]:
            if not line.startswith("> may "):
                arrange(rig, *shlex.split(line[2:]))
        where = str(rig.kubeconfig)
        words = shlex.split(lines[-1].replace("KUBECONFIG", where))[2:]
        environ = {"COLUMNS": "9999"} | ({} if "--kubeconfig" in words else {"KUBECONFIG": where})
        said = await rig.run(*words, environ=environ)
    told = "".join(f"! {line}\n" for line in said.err.splitlines() if line.startswith("hami-agent"))
    text = re.sub(r"\b\d+ s\b", "some s", f"{said.out}{told}").replace(where, "KUBECONFIG")
    given = "".join(f"{line}\n" for line in lines)
    return f"{given}exit {said.code}\n{text}"


@pytest.mark.parametrize("name", TOLD)
async def test_what_objects_and_events_say_of_nodes_is_shown(name, tmp_path, capsys):
    text = await screen(name, tmp_path, capsys)

    assert golden_part(FILE, name, text) == text


KNOWN = StatusDocument(node=NodeStatus(name="a", version="9.9.9", ready=True), gpus=())
COMMAND = ["hami-agent", "status", "-o", "json"]


@pytest.mark.parametrize("others", [False, True], ids=["alone", "others evicted or replaced"])
async def test_the_agent_is_read_in_its_pod(rig, others):
    if others:
        rig.agent_pod("a", "agent-a", status={"phase": "Failed"})
        leaving = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
        rig.agent_pod("a", "agent-b", metadata=leaving)
    rig.agent_pod("a")
    async with rig.answering(envelope("Status", KNOWN, NOON)) as asked:
        found = await rig.run("status", "--node", "a", "-o", "json")

    assert (0, "9.9.9") == (found.code, found.data["node"]["version"])
    source = json.loads(found.out)["source"]
    assert source.startswith("agent of a in its pod, through the API server by ")
    assert "/api/v1/namespaces/kube-system/pods/agent-x/exec" == asked[-1].path
    assert (COMMAND, "agent") == (asked[-1].query.getall("command"), asked[-1].query["container"])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (403, "the API server answered 403: forbidden"),
        (200, "the API server answered 200: forbidden"),
        ("hami-agent status: no agent answers at /run/x", "no agent answers at /run/x"),
        (b"[]", "the answer is no Status"),
    ],
    ids=["forbidden", "no websocket", "the command fails", "no status"],
)
async def test_an_agent_that_cannot_be_read_in_its_pod_is_told(rig, answer, said):
    rig.node("a", a_gpu("GPU-1"))
    rig.agent_pod("a")
    async with rig.answering(answer):
        found = await rig.run("status", "--node", "a")

    assert said in found.err


async def test_a_pod_that_only_bears_the_agents_label_is_not_asked(rig):
    owners = [{"kind": "DaemonSet", "name": "hami-agent", "controller": True}]
    tenants = {"namespace": "a-tenant", "ownerReferences": owners}
    rig.agent_pod("a", metadata=tenants, spec={"volumes": []})
    async with rig.answering(b"{}") as asked:
        await rig.run("status", "--node", "a")

    assert asked
    assert not any(one.path.endswith("/exec") for one in asked)


WRONG = {"id": "P-PATHS", "verdict": "wrong", "subject": "/x", "said": "is full", "means": "none"}
LATER = {"id": "P-NEW", "verdict": "note", "subject": "a\x1b[31m", "said": "is new"}
WELL = {"id": "P-NEW", "verdict": "ok", "subject": "a check", "said": "of a later version"}
CHOSEN = ("doctor", "-o", "json", "--pre", "--only", "kubelet")


@pytest.mark.parametrize(
    ("words", "asked", "found", "code", "said"),
    [
        ((), ("doctor", "-o", "json"), [WRONG, WELL], 1, "P-PATHS      /x: is full\n"),
        (("--pre", "--only", "kubelet"), CHOSEN, [], 0, ""),
        (("-o", "wide"), ("doctor", "-o", "json"), [WELL], 0, "P-NEW        a check: of a later"),
        ((), ("doctor", "-o", "json"), [LATER], 0, "P-NEW        a"),
    ],
    ids=["wrong", "before the start", "a later version", "its note"],
)
async def test_a_node_of_the_cluster_is_checked_in_its_pod(rig, words, asked, found, code, said):
    kind = "Preflight" if "--pre" in words else "Checkup"
    answer = envelope(kind, {"ok": True, "complete": True, "findings": found}, NOON)
    rig.agent_pod("a")
    async with rig.answering(answer) as urls:
        told = await rig.run("doctor", "--node", "a", *words)

    assert ["hami-agent", *asked] == urls[-1].query.getall("command")
    assert (code, True, False) == (told.code, said in told.out, "\x1b" in told.out)


async def test_a_pod_behind_a_proxy_is_reached_through_it(rig):
    rig.agent_pod("a")
    async with rig.answering(envelope("Status", KNOWN, NOON)) as asked:
        text = rig.kubeconfig.read_text()
        (url,) = re.findall(r'server: "(.*?)"', text)
        way = f'server: "http://api.invalid:6443", proxy-url: "{url}"'
        rig.kubeconfig.write_text(text.replace(f'server: "{url}"', way))
        found = await rig.run("status", "--node", "a", "-o", "json")

    assert (0, "9.9.9") == (found.code, found.data["node"]["version"])
    assert "/api/v1/namespaces/kube-system/pods/agent-x/exec" == asked[-1].path
