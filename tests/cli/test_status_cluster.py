"""`--node` of status and doctor: a node of the cluster, in its agent's pod or by its objects."""

import json
import re

import pytest

from agent.cli.main import dispatch
from agent.hami.annotations import encode_stamp
from agent.status import NodeStatus, StatusDocument, envelope
from tests.builders import NOON
from tests.fakes.explain_rig import a_gpu, explain_rig

pytestmark = pytest.mark.looptime(False)

READS = frozenset({("get", "nodes"), ("list", "nodes"), ("list", "pods")})


async def test_without_an_agent_the_objects_say_who_holds_what(rig):
    rig.node("a", a_gpu("GPU-1"), a_gpu("GPU-2", 1, healthy=False))
    rig.holder("train", "a", "GPU-1", mib=4096, cores=30)
    rig.lock_node("a", "train")
    found = await rig.run("status", "--node", "a")
    listed = await rig.run("status", "--node", "a", "-o", "json")

    assert 5 == found.code
    assert "a  by its objects" in found.out
    assert "lock  held by default/train for " in found.out
    assert "GPU 1 bad: the Node's register annotation says that it is unhealthy" in found.out
    assert "read the log of its device plugin" in " ".join(found.out.split())
    assert "no pod of the agent is on the node a" in found.err
    assert [("train", 4096, 30)] == [
        (one["pod"], share["memoryMib"], share["cores"])
        for one in listed.data["allocations"]
        for share in one["shares"]
    ]


def tell(rig, node, number, reason, said, writer="hami-agent", ago=150):
    """Somebody posts an Event about the Node."""
    rig.store.create(
        "events",
        {
            "metadata": {"name": f"a.{number}", "namespace": "default"},
            "involvedObject": {"kind": "Node", "name": node},
            "source": {"component": writer},
            "type": "Warning",
            "reason": reason,
            "message": said,
            "lastTimestamp": encode_stamp(rig.now(-ago)),
        },
    )


RELEASED = "an operator released it; `hami-agent recheck GPU` takes it back [H-RELEASED]"
CONDITION = (
    f"GPU 1 (GPU-2) is unmonitored: {RELEASED}; GPU 2 (GPU-3) is lost: it is silent [H-LOST]; "
    "GPU 3 (GPU-4) is lost: it is silent [H-LOST]"
)
EVENTS = (
    ("GpuReleased", f"GPU 1 (GPU-2): {RELEASED}"),
    ("GpuUnhealthy", "GPUs 2, 3: it is silent [H-LOST]"),
    ("GpuRecovered", "GPUs 1, 2, 3: healthy again"),
)


@pytest.mark.parametrize("by", ["condition", "Events"])
async def test_the_objects_of_the_node_say_what_is_wrong_with_its_gpus(rig, by):
    conditions = [{"type": "GpuDegraded", "status": "True", "message": CONDITION}]
    bad = [a_gpu(f"GPU-{n + 1}", n, healthy=False) for n in (1, 2, 3)]
    more = {"conditions": conditions} if by == "condition" else {}
    rig.node("a", a_gpu("GPU-1"), *bad, **more)
    for number, (reason, said) in enumerate(EVENTS if by == "Events" else ()):
        tell(rig, "a", number, reason, said)
    found = await rig.run("status", "--node", "a")

    text = " ".join(found.out.split())
    assert f"GPU 1 released: {RELEASED}" in text
    assert "GPUs 2, 3 lost: it is silent [H-LOST]" in text
    table = "\n".join(found.out.split("\n")[2:6])
    assert ["ok", "released", "LOST", "LOST"] == re.findall(r"\b(ok|released|LOST|BAD)\b", table)


@pytest.mark.parametrize(("gone", "back"), [(60, 30), (30, 60)])
async def test_the_last_event_about_a_gpu_says_what_is_to_be_done(rig, gone, back):
    rig.node("a", a_gpu("GPU-1", healthy=False))
    lost = "GPU 0 (GPU-1): the driver no longer reaches it; reboot the node [H-LOST]"
    rest = "GPU 0 (GPU-1): it was lost and is back; it is served again after the cool-down"
    tell(rig, "a", 1, "GpuUnhealthy", lost, ago=gone)
    tell(rig, "a", 2, "GpuUnhealthy", f"{rest} [H-LOST]", ago=back)
    found = await rig.run("status", "--node", "a", "--objects", "--since", "1h")

    notice = next(line for line in found.out.splitlines() if line.startswith("GPU 0 "))
    is_back = back < gone
    assert ("bad: it was lost and is back" if is_back else "LOST".lower()) in notice
    assert ("reboot" in " ".join(found.out.partition("slices in use")[0].split())) != is_back
    assert is_back == (found.out.index("is back") < found.out.rindex("reboot the node"))


async def test_a_gpu_that_cools_down_after_its_release_is_bad_and_not_released(rig):
    rig.node("a", a_gpu("GPU-1", healthy=False))
    said = "it was unhealthy before it was released [H-RELEASED]"
    tell(rig, "a", 1, "GpuUnhealthy", f"GPU 0 (GPU-1): {said}")
    found = await rig.run("status", "--node", "a", "--objects")

    assert f"GPU 0 bad: {said}" in found.out


async def test_what_the_scheduler_reads_is_shown_on_request_and_is_complete(rig):
    rig.node("a", a_gpu("GPU-1"))
    found = await rig.run("status", "--node", "a", "--objects")

    assert (0, "") == (found.code, found.err)
    assert "source: objects of the API server by " in found.out


@pytest.mark.parametrize(
    "words",
    [["--since=1h", "--objects"], ["--by=pod", "--resource=r"], ["--since=1h", "--kubeconfig=k"]],
)
def test_what_the_list_of_nodes_cannot_say_is_refused(words, capsys):
    assert 2 == dispatch(["status", *words], {})

    option = words[1].partition("=")[0]
    assert f"{option}: this lists the Nodes of a cluster; give --node" in capsys.readouterr().err


async def test_a_cluster_that_is_named_is_listed_without_asking_an_agent(rig):
    rig.node("a", a_gpu("GPU-1"))
    found = await rig.run("status", "--kubeconfig", str(rig.kubeconfig), environ={})

    assert (0, "", True) == (found.code, found.err, "\na " in found.out)
    assert f"source: API server by {rig.kubeconfig}" in found.out


@pytest.mark.parametrize(
    ("rights", "node", "environ", "code", "said"),
    [
        (None, "gpu-a7", None, 4, "no Node gpu-a7\n"),
        (None, "xyz", None, 4, "no Node xyz\n"),
        (READS - {("get", "nodes")}, "gpu-a07", None, 3, "get nodes"),
        (None, "gpu-a07", {}, 3, "no kubeconfig: give --kubeconfig"),
        (None, "odd", None, 3, "the register annotation of odd cannot be read"),
    ],
)
async def test_what_cannot_be_read_is_an_error_with_its_reason(
    tmp_path, capsys, rights, node, environ, code, said
):
    async with explain_rig(tmp_path, capsys, rights) as rig:
        rig.node("gpu-a07", a_gpu("GPU-1"))
        rig.node("odd", annotations={"hami.io/node-nvidia-register": "[1]"})
        found = await rig.run("status", "--node", node, environ=environ)

    assert (code, "", True) == (found.code, found.out, said in found.err)


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


async def test_without_the_agent_the_nodes_events_are_its_changes(rig, tmp_path, capsys):
    rig.node("a", a_gpu("GPU-1"))
    for number, writer in enumerate(("hami-agent", "kubelet")):
        tell(rig, "a", number, "GpuUnhealthy", f"XID 79, says the {writer}", writer)
    found = await rig.run("status", "--node", "a", "--since", "1h")
    later = await rig.run("status", "--node", "a", "--since", "1m")
    listed = await rig.run("status", "--node", "a", "-o", "json")

    assert "changes:\n2 min ago  GpuUnhealthy: XID 79, says the hami-agent" in found.out
    assert "refusals: not known, because no agent was read" in found.out
    assert "kubelet" not in found.out
    assert "changes: none" in later.out
    assert [("GpuUnhealthy", True)] == [
        (one["reason"], one["warning"]) for one in listed.data["changes"]
    ]
    async with explain_rig(tmp_path, capsys, READS) as blind:
        blind.node("a", a_gpu("GPU-1"))
        assert "changes: not known" in (await blind.run("status", "--node", "a", "--since=1h")).out


async def test_on_a_workstation_the_nodes_are_listed(rig):
    rig.node("gpu-10", a_gpu("GPU-1"), a_gpu("GPU-2", 1, healthy=False))
    rig.node("gpu-9", a_gpu("GPU-3"), annotations={"hami.io/device-cordon": "GPU-3"})
    rig.node("plain")
    rig.node("odd", annotations={"hami.io/node-nvidia-register": "[1]"})
    rig.holder("train", "gpu-10", "GPU-1", mib=4096)
    found = await rig.run("status")
    listed = await rig.run("status", "-o", "json")

    lines = [line.split() for line in found.out.splitlines()]
    assert ["NODE", "GPUS", "UNHEALTHY", "CORDONED", "SLICES", "ALLOCATED", "FREE"] == lines[0]
    assert [["gpu-9", "1", "0", "1"], ["gpu-10", "2", "1", "0"]] == [one[:4] for one in lines[1:3]]
    assert ["1/20", "4.0/31.2", "GiB", "11.6", "GiB"] == lines[2][4:9]
    assert ["odd", "?"] == lines[3][:2]
    assert ["gpu-9", "gpu-10", "odd"] == [one["node"]["name"] for one in listed.data]
    assert (5, True) == (found.code, "--node NAME reads one" in found.err)


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--node", "a", "--resource", "r"), "--resource-name: has no effect with --node"),
        (("--node", "a", "--config", "/x"), "--config: has no effect with --node"),
        (("--context", "c"), "--context: has no effect without --node"),
    ],
)
def test_an_option_that_the_other_way_to_check_ignores_is_refused(words, said, capsys):
    assert 2 == dispatch(["doctor", *words], {})

    assert said in capsys.readouterr().err
