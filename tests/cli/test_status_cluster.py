"""`--node` of status and doctor: a node of the cluster, in its agent's pod or by its objects."""

import asyncio
import json
import re
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from agent.hami.annotations import encode_stamp
from agent.status import NodeStatus, StatusDocument, envelope
from tests.builders import NOON
from tests.cli.test_explain import Printed
from tests.fakes.explain_rig import REGISTER, ExplainRig, a_gpu, explain_rig

pytestmark = pytest.mark.looptime(False)

GOLDEN = Path("tests/golden/status-cluster.txt")
READS = frozenset({("get", "nodes"), ("list", "nodes"), ("list", "pods")})


def tell(
    rig: ExplainRig, reason: str, said: str, writer: str = "hami-agent", ago: float = 150
) -> None:
    """Somebody posts an Event about the Node."""
    rig.store.create(
        "events",
        {
            "metadata": {"name": f"a.{rig.store.version}", "namespace": "default"},
            "involvedObject": {"kind": "Node", "name": "a"},
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


def well(rig: ExplainRig) -> None:
    rig.node("a", a_gpu("GPU-1"))


def in_use(rig: ExplainRig) -> None:
    rig.node("a", a_gpu("GPU-1"), a_gpu("GPU-2", 1, healthy=False))
    rig.holder("train", "a", "GPU-1", mib=4096, cores=30)
    rig.holder("over", "a", "GPU-1")
    rig.edit_pod("over", {"status": {"phase": "Succeeded"}})
    rig.lock_node("a", "train")


def ill(rig: ExplainRig, **parts: Any) -> None:
    rig.node("a", a_gpu("GPU-1"), *(a_gpu(f"GPU-{n + 1}", n, healthy=False) for n in (1, 2, 3)))
    rig.store.update("nodes", "", "a", lambda node: node | {"status": node["status"] | parts})


def ill_by_events(rig: ExplainRig) -> None:
    ill(rig)
    tell(rig, "GpuReleased", f"GPU 1 (GPU-2): {RELEASED}")
    tell(rig, "GpuUnhealthy", "GPUs 2, 3: it is silent [H-LOST]")
    tell(rig, "GpuRecovered", "GPUs 1, 2, 3: healthy again", ago=100)


def lost_and_back(rig: ExplainRig, gone: float, back: float) -> None:
    rig.node("a", a_gpu("GPU-1", healthy=False))
    lost = "GPU 0 (GPU-1): the driver no longer reaches it; reboot the node [H-LOST]"
    rest = "GPU 0 (GPU-1): it was lost and is back; it is served again after its cool-down"
    tell(rig, "GpuUnhealthy", lost, ago=gone)
    tell(rig, "GpuUnhealthy", f"{rest} [H-LOST]", ago=back)


def was_released(rig: ExplainRig) -> None:
    rig.node("a", a_gpu("GPU-1", healthy=False))
    said = "it was unhealthy before it was released [H-RELEASED]"
    tell(rig, "GpuUnhealthy", f"GPU 0 (GPU-1): {said}")


def with_events(rig: ExplainRig) -> None:
    well(rig)
    for writer in ("hami-agent", "kubelet"):
        tell(rig, "GpuUnhealthy", f"XID 79, says the {writer}", writer)


def many(rig: ExplainRig) -> None:
    rig.node("gpu-10", a_gpu("GPU-1"), a_gpu("GPU-2", 1, healthy=False))
    rig.node("gpu-9", a_gpu("GPU-3"), annotations={"hami.io/device-cordon": "GPU-3"})
    rig.node("plain")
    rig.node("odd", annotations={REGISTER: "[1]"})
    rig.holder("train", "gpu-10", "GPU-1", mib=4096)


def nameless(rig: ExplainRig) -> None:
    """A Node and a pod of which the server does not say the UID."""
    many(rig)
    rig.holder("other", "gpu-10", "GPU-1")
    for kind, space, name in (("nodes", "", "gpu-9"), ("pods", "default", "other")):
        rig.store.get(kind, space, name)["metadata"]["uid"] = ""


Arrange = Callable[[ExplainRig], object]
SCREENS: dict[str, tuple[Arrange, str, frozenset[tuple[str, str]] | None]] = {
    "without an agent": (in_use, "--node a", None),
    "without an agent, who holds what": (in_use, "--node a --by pod", None),
    "the condition says what is wrong": (
        lambda rig: ill(
            rig, conditions=[{"type": "GpuDegraded", "status": "True", "message": CONDITION}]
        ),
        "--node a",
        None,
    ),
    "Events say what is wrong": (ill_by_events, "--node a", None),
    "a GPU was lost and is back": (
        lambda rig: lost_and_back(rig, 60, 30),
        "--node a --objects --since 1h",
        None,
    ),
    "a GPU was back and is lost": (
        lambda rig: lost_and_back(rig, 30, 60),
        "--node a --objects --since 1h",
        None,
    ),
    "a released GPU cools down": (was_released, "--node a --objects", None),
    "the objects on request": (well, "--node a --objects", None),
    "what happened": (with_events, "--node a --since 1h", None),
    "what happened in a minute": (with_events, "--node a --since 1m", None),
    "no right to Events": (with_events, "--node a --since 1h", READS),
    "no such Node": (well, "--node xyz", None),
    "no right to the Node": (well, "--node a", READS - {("get", "nodes")}),
    "a report that cannot be read": (many, "--node odd", None),
    "the cluster": (many, "", None),
    "the cluster of a kubeconfig": (many, "--kubeconfig KUBECONFIG", None),
    "a kubeconfig that is not there": (well, "--node a --kubeconfig /none", None),
    "objects without a name": (nameless, "", None),
}


async def screen(rig: ExplainRig, name: str) -> str:
    """Exit code and text of one case, without what differs from run to run."""
    arrange, words, _ = SCREENS[name]
    arrange(rig)
    where = str(rig.kubeconfig)
    environ = {"COLUMNS": "9999"} | ({} if "--kubeconfig" in words else {"KUBECONFIG": where})
    said = await rig.run(
        "status", *shlex.split(words.replace("KUBECONFIG", where)), environ=environ
    )
    told = "".join(f"! {line}\n" for line in said.err.splitlines() if line.startswith("hami-agent"))
    text = re.sub(r"\b\d+ s\b", "some s", f"{said.out}{told}").replace(where, "KUBECONFIG")
    return f"exit code {said.code}\n{text}"


def golden() -> dict[str, str]:
    """What is said in each case. `python -m tests.cli.test_status_cluster` writes it."""
    _, *parts = re.split("^=== (.*)\n", GOLDEN.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("name", SCREENS)
async def test_what_objects_and_events_say_of_nodes_is_shown(name, tmp_path, capsys):
    async with explain_rig(tmp_path, capsys, SCREENS[name][2]) as rig:
        assert golden()[name] == await screen(rig, name)


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


async def write_golden() -> None:
    parts = []
    for name, (_, _, rights) in SCREENS.items():
        with tempfile.TemporaryDirectory() as folder:
            async with explain_rig(Path(folder), cast("Any", Printed()), rights) as rig:
                parts.append(f"=== {name}\n{await screen(rig, name)}")
    await asyncio.to_thread(GOLDEN.write_text, "".join(parts), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(write_golden())
