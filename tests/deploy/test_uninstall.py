"""After the chart is gone, so is what the agents wrote on the Nodes, and nothing of others."""

import asyncio
import http.client
import sys
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

from agent.sandbox.apiserver import ApiServerModel
from agent.sandbox.store import ObjectStore
from tests.deploy.carried import uninstall
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock

pytestmark = pytest.mark.looptime(False)
REGISTER, HANDSHAKE = "hami.io/node-nvidia-register", "hami.io/node-handshake"
SCORE, LOCK, OWN = "hami.io/node-nvidia-score", "hami.io/mutex.lock", "hami-agent/gpus"
SELECTOR = "app.kubernetes.io/name=hami-agent"
EVERYTHING = {REGISTER: "[]", SCORE: "[]", HANDSHAKE: "", LOCK: "a", OWN: "1", "seen": "1"}
AGENT, OTHER = "hami-agent", "nvidia-device-plugin"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return uninstall()


def test_it_needs_nothing_but_python(script: ModuleType):
    imported = {
        name.split(".")[0]
        for name in vars(script).values()
        if isinstance(name, ModuleType)
        for name in [name.__name__]
    }

    assert imported <= sys.stdlib_module_names


def node(name: str, annotations: Mapping[str, str], **writers: str) -> dict[str, Any]:
    """A Node, and who wrote its annotations last; `agent` and `other` name keys by spaces."""
    managed = [
        {
            "manager": manager,
            "fieldsV1": {"f:metadata": {"f:annotations": {f"f:{key}": {} for key in keys.split()}}},
        }
        for manager, keys in ((AGENT, writers.get("agent", "")), (OTHER, writers.get("other", "")))
    ]
    metadata: dict[str, Any] = {"name": name, "managedFields": managed}
    metadata["annotations"] = dict(annotations)
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


ALL = f"{REGISTER} {SCORE} {HANDSHAKE} {OWN}"
CASES = {
    "ours alone": (EVERYTHING, {"agent": ALL}, {LOCK: "a", "seen": "1"}),
    "ours without a stamp": ({REGISTER: "[]", OWN: "1"}, {"agent": f"{REGISTER} {OWN}"}, {}),
    "another plugin followed": (
        {REGISTER: "[]", HANDSHAKE: "b", OWN: "1"},
        {"agent": OWN, "other": f"{REGISTER} {HANDSHAKE}"},
        {REGISTER: "[]", HANDSHAKE: "b"},
    ),
    "another plugin followed and says the same": (
        {REGISTER: "[]", HANDSHAKE: "Reported_b"},
        {"agent": REGISTER, "other": HANDSHAKE},
        {REGISTER: "[]", HANDSHAKE: "Reported_b"},
    ),
    "the scheduler answered": (
        {REGISTER: "[]", HANDSHAKE: "Requesting_b"},
        {"agent": REGISTER, "other": HANDSHAKE},
        {},
    ),
    "never ours": ({REGISTER: "[]"}, {"other": REGISTER}, {REGISTER: "[]"}),
    "nothing at all": ({}, {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_of_one_node_goes_what_the_agent_wrote(script: ModuleType, case: str):
    annotations, writers, left = CASES[case]
    found = node("a", annotations, **writers)["metadata"]

    assert set(annotations) - set(left) == set(script.ours(found))


class FakeApi:
    """Nodes and pods in memory. `fail` maps names of Nodes to codes, each given once.

    `pods` are those present at each question, with their Nodes; the last ones stay.
    """

    def __init__(self, *nodes: dict[str, Any], pods: Sequence[Mapping[str, str]] = ()) -> None:
        self.nodes = {one["metadata"]["name"]: one["metadata"] for one in nodes}
        self.ready: dict[str, str] = {}
        self.fail: dict[str, int] = {}
        self.patches: list[str] = []
        self.forgotten: list[str] = []
        self._pods = list(pods)
        self.asked: list[dict[str, str]] = []

    def items(self, path: str, accept: str = "", **query: str) -> Iterator[dict[str, Any]]:
        if path == "/api/v1/nodes":
            return iter([{"metadata": dict(one)} for one in self.nodes.values()])
        self.asked.append({"path": path, **query})
        present = self._pods[0] if self._pods else {}
        del self._pods[: len(self._pods) > 1]
        whole = accept == "application/json"
        return iter(
            [
                {"metadata": {"name": name}} | ({"spec": {"nodeName": node}} if whole else {})
                for name, node in present.items()
            ]
        )

    def ask(self, path: str, accept: str = "", patch: object = None) -> dict[str, Any]:
        name = path.removeprefix("/api/v1/nodes/").removesuffix("/status")
        if name not in self.nodes:
            raise urllib.error.HTTPError(path, 404, "no", http.client.HTTPMessage(), None)
        if patch is None:
            found: dict[str, Any] = {"metadata": dict(self.nodes[name])}
            if accept == "application/json":
                ready = {"type": "Ready", "status": self.ready.get(name, "True")}
                found["status"] = {"conditions": [{"type": "Other", "status": "Unknown"}, ready]}
            return found
        if name in self.fail:
            headers = http.client.HTTPMessage()
            raise urllib.error.HTTPError(path, self.fail.pop(name), "no", headers, None)
        assert isinstance(patch, dict)
        if path.endswith("/status"):
            self.forgotten.append(name)
            return {"metadata": dict(self.nodes[name])}
        changes = patch["metadata"]["annotations"]
        held = self.nodes[name]["annotations"]
        self.nodes[name]["annotations"] = {k: v for k, v in held.items() if k not in changes}
        self.patches.append(name)
        return {"metadata": dict(self.nodes[name])}


def served(name: str) -> dict[str, Any]:
    """A Node with annotations of ours and of others, at some version."""
    made: dict[str, Any] = node(name, EVERYTHING, agent=ALL)
    made["metadata"]["resourceVersion"] = "1"
    return made


def test_every_node_is_cleaned_once(script: ModuleType, capsys: pytest.CaptureFixture[str]):
    api = FakeApi(served("a"), served("b"), node("c", {"seen": "1"}))

    assert 0 == script.main("gpus", SELECTOR, api)

    assert ["a", "b"] == api.patches
    assert {LOCK: "a", "seen": "1"} == api.nodes["a"]["annotations"]
    assert "a: removed" in capsys.readouterr().out


def with_condition(made: dict[str, Any], manager: str) -> dict[str, Any]:
    """The same Node, whose condition GpuDegraded somebody wrote."""
    fields = {"f:status": {"f:conditions": {'k:{"type":"GpuDegraded"}': {}}}}
    entry = {"manager": manager, "subresource": "status", "fieldsV1": fields}
    made["metadata"]["managedFields"].append(entry)
    return made


def test_the_condition_goes_where_the_agent_wrote_it(script: ModuleType):
    mine, theirs = with_condition(served("a"), AGENT), with_condition(served("b"), OTHER)
    bare = with_condition(node("c", {}), AGENT)
    api = FakeApi(mine, theirs, bare, served("d"))

    assert 0 == script.main("gpus", SELECTOR, api)

    assert ["a", "c"] == api.forgotten
    assert ["a", "b", "d"] == api.patches


def test_the_agents_pods_are_waited_for(script: ModuleType):
    api = FakeApi(served("a"), pods=[{"one": "a", "two": "b"}, {"two": "b"}, {}])

    assert 0 == script.main("gpus", SELECTOR, api, pause=0.001)

    asked = {"path": "/api/v1/namespaces/gpus/pods", "labelSelector": SELECTOR}
    assert [asked] * 3 == api.asked
    assert ["a"] == api.patches


@pytest.mark.parametrize("ready", ["True", "False"])
def test_a_pod_that_does_not_end_keeps_its_own_node_as_it_is_and_no_other(
    script: ModuleType, capsys: pytest.CaptureFixture[str], ready: str
):
    api = FakeApi(served("a"), with_condition(served("b"), AGENT), served("c"), pods=[{"one": "b"}])
    api.ready["b"] = ready

    assert 1 == script.main("gpus", SELECTOR, api, patience=-1.0)

    assert ["a", "c"] == api.patches
    assert [] == api.forgotten
    assert EVERYTHING == api.nodes["b"]["annotations"]
    told = capsys.readouterr().out
    assert "would write again: b (pod one); clean them by hand" in told


def test_a_node_without_a_kubelet_holds_nobody_up_and_is_cleaned(script: ModuleType):
    pods = {"one": "a", "two": "gone", "three": ""}
    api = FakeApi(served("a"), served("b"), pods=[pods])
    api.ready["a"] = "Unknown"

    assert 0 == script.main("gpus", SELECTOR, api, patience=-1.0)

    assert ["a", "b"] == api.patches


def test_a_node_whose_kubelet_cannot_be_asked_for_is_none_without(script: ModuleType):
    class Refusing(FakeApi):
        def ask(self, path: str, accept: str = "", patch: object = None) -> dict[str, Any]:
            raise urllib.error.HTTPError(path, 403, "no", http.client.HTTPMessage(), None)

    api = Refusing(served("a"), pods=[{"one": "a"}])

    with pytest.raises(urllib.error.HTTPError, match="403"):
        script.main("gpus", SELECTOR, api, patience=-1.0)

    assert [] == api.patches


def test_a_change_in_between_is_looked_at_anew(script: ModuleType):
    api = FakeApi(served("a"))
    api.fail["a"] = 409

    assert 0 == script.main("gpus", SELECTOR, api)

    assert ["a"] == api.patches


def test_a_node_that_is_gone_is_clean(script: ModuleType):
    api = FakeApi(served("a"), served("b"))
    api.fail["a"] = 404

    assert 0 == script.main("gpus", SELECTOR, api)


def test_a_refusal_for_one_node_stops_no_other_and_is_told(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
):
    api = FakeApi(served("a"), served("b"))
    api.fail["a"] = 403

    assert 1 == script.main("gpus", SELECTOR, api)

    assert ["b"] == api.patches
    assert "something is left on: a" in capsys.readouterr().out


async def test_over_http_a_node_is_changed_only_as_it_was_seen(script: ModuleType):
    model = ApiServerModel(ObjectStore(ManualClock(), Seeded(1)), {"t": "admin"})
    await model.start()
    try:
        for number in range(300):
            model.store.create("nodes", node(f"n{number:03}", {OWN: "1"}))
        api = script.Api(model.url, "t", None)

        found = await asyncio.to_thread(lambda: list(api.items("/api/v1/nodes")))
        old = dict(found[0]["metadata"])
        assert await asyncio.to_thread(script.clean, api, found[0]["metadata"])
        assert await asyncio.to_thread(script.clean, api, old)

        assert 300 == len(found)
        assert {} == model.store.get("nodes", "", "n000")["metadata"].get("annotations", {})
        assert {OWN: "1"} == model.store.get("nodes", "", "n001")["metadata"]["annotations"]
    finally:
        await model.stop()
