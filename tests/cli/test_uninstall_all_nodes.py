"""`uninstall --all-nodes`: what became of each Node, and an exit code for all of them."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent.cli.main import dispatch
from agent.errors import ApiError, ApiForbidden
from agent.kube.leftovers import KubeLeftovers, NodeLeftovers
from tests.fakes.kubeworld import ModelWorld, model_world

pytestmark = pytest.mark.looptime(False)
OWN = "hami-agent/gpus"
EVERYWHERE = ("--all-nodes", "--namespace", "gpus", "--selector", "app=agent")


@pytest.mark.parametrize(
    "words", [["--all-nodes"], ["--all-nodes", "--namespace", "a"], ["--selector", "a=b"]]
)
def test_all_nodes_need_to_know_the_agents_pods(
    words: list[str], capsys: pytest.CaptureFixture[str]
):
    assert 2 == dispatch(["uninstall", *words], {})
    assert "go together" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--force"], "--force"),
        (["--node-name", "a", "--split-count", "9"], "--node-name, --split-count"),
        (["--config", "a.yaml"], "--config"),
        (["--mig-strategy", "none"], "--mig-strategy"),
    ],
)
def test_what_has_no_effect_for_all_nodes_is_refused(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
):
    assert 2 == dispatch(["uninstall", *EVERYWHERE, *words], {"KUBECONFIG": "/none"})
    assert f"{named} would have no effect" in capsys.readouterr().err


def test_without_a_kubeconfig_the_flag_and_the_variable_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert 2 == dispatch(["uninstall", *EVERYWHERE], {})
    said = capsys.readouterr().err
    assert "give --kubeconfig, or set KUBECONFIG" in said
    assert 3 == dispatch(["uninstall", *EVERYWHERE, "--kubeconfig", str(tmp_path / "none")], {})
    assert "give the path of a readable kubeconfig" in capsys.readouterr().err


def test_in_a_pod_its_own_account_comes_before_the_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    environ = {"KUBECONFIG": str(tmp_path / "none"), "KUBERNETES_SERVICE_HOST": "127.0.0.1"}

    assert 3 == dispatch(["uninstall", *EVERYWHERE], environ)

    assert str(tmp_path) not in capsys.readouterr().err


async def _nobody(*_: object) -> dict[str, str]:
    return {}


@pytest_asyncio.fixture
async def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[ModelWorld]:
    """Two Nodes with something of an agent's."""
    async with model_world(tmp_path, "admin") as made:
        for name in "ab":
            status = {"conditions": [{"type": "Ready", "status": "True"}]}
            metadata = {"name": name, "annotations": {OWN: "1"}}
            made.store.create("nodes", {"metadata": metadata, "status": status})
        # The model evaluates no selector of labels; tests/peers asks the real server with one.
        monkeypatch.setattr(KubeLeftovers, "agents", _nobody)
        yield made


async def everywhere(world: ModelWorld, *words: str) -> int:
    """The exit code of the verb for all Nodes."""
    environ = {"KUBECONFIG": str(world.kubeconfig)}
    return await asyncio.to_thread(dispatch, ["uninstall", *EVERYWHERE, *words], environ)


async def test_all_nodes_are_told_by_name(two: ModelWorld, capsys: pytest.CaptureFixture[str]):
    assert 0 == await everywhere(two)
    assert [f"{name}: removed {OWN}" for name in "ab"] == capsys.readouterr().out.splitlines()


def refuse(monkeypatch: pytest.MonkeyPatch, error: ApiError) -> None:
    """Changes of Node a fail."""
    plain = KubeLeftovers.clean

    async def clean(api: KubeLeftovers, node: NodeLeftovers) -> None:
        if node.name == "a":
            raise error
        await plain(api, node)

    monkeypatch.setattr(KubeLeftovers, "clean", clean)


async def test_a_node_that_fails_is_told_and_ends_with_1(
    two: ModelWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    refuse(monkeypatch, ApiForbidden("no right", status=403))

    assert 1 == await everywhere(two)
    lines = capsys.readouterr().out.splitlines()
    assert ["a: something is left: no right", f"b: removed {OWN}"] == lines
    assert 1 == await everywhere(two, "-o", "json")
    document = json.loads(capsys.readouterr().out)["data"]
    assert (False, "", "no right") == (
        *(document["ok"], document["refusal"]),
        document["nodes"][0]["failure"],
    )


async def test_a_server_that_falls_silent_ends_with_3(
    two: ModelWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    refuse(monkeypatch, ApiError("no answer"))

    assert 3 == await everywhere(two)
    assert "hami-agent uninstall: no answer" in capsys.readouterr().err
    assert 3 == await everywhere(two, "-o", "json")
    document = json.loads(capsys.readouterr().out)["data"]
    assert (False, "no answer") == (document["ok"], document["refusal"])
    assert {OWN: "1"} == two.store.get("nodes", "", "b")["metadata"]["annotations"]


async def test_a_node_with_an_agent_that_does_not_end_is_told_with_its_pod(
    two: ModelWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    async def present(*_: object) -> dict[str, str]:
        return {"agent-1": "a"}

    monkeypatch.setattr(KubeLeftovers, "agents", present)
    monkeypatch.setattr("agent.cli.uninstall.PATIENCE", 0.0)

    assert 1 == await everywhere(two)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a: something is left: its agent has not ended and would write again")
    assert "(pod agent-1): clean it by hand" in first
    assert f"b: removed {OWN}" == second
    assert 1 == await everywhere(two, "-o", "json")
    assert not json.loads(capsys.readouterr().out)["data"]["ok"]


async def test_a_node_on_which_a_plugin_serves_is_skipped_and_that_is_no_failure(
    two: ModelWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("agent.cli.uninstall.VACATING", 0.0)
    offer = {"allocatable": {"gpus.example/one": "80"}}
    two.store.update("nodes", "", "a", lambda one: one | {"status": one["status"] | offer})

    assert 0 == await everywhere(two, "--resource-name", "gpus.example/one")

    out = capsys.readouterr().out.splitlines()
    assert ["a: skipped: a device plugin serves gpus.example/one there", f"b: removed {OWN}"] == out
    assert {OWN: "1"} == two.store.get("nodes", "", "a")["metadata"]["annotations"]


async def test_what_becomes_of_a_node_is_told_before_the_next_is_begun(
    two: ModelWorld, monkeypatch: pytest.MonkeyPatch
):
    class Paper(io.StringIO):
        def flush(self) -> None:
            seen.append(self.getvalue())

    seen: list[str] = []
    monkeypatch.setattr("sys.stdout", Paper())

    assert 0 == await everywhere(two)

    assert f"a: removed {OWN}\n" in seen
