"""`uninstall`: a line for each Node and for what stays, an exit code, and the same as JSON."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog

from agent.cli.main import dispatch
from agent.core.annotations import HANDSHAKE, MUTEX_LOCK, REGISTER
from agent.host.lockfile import LockFile
from tests.builders import NODE
from tests.fakes.kubeworld import ModelWorld, model_world

pytestmark = pytest.mark.looptime(False)
OWN = "hami-agent/gpus"
NOTES = {REGISTER: "[]", OWN: "1", MUTEX_LOCK: "a", "seen": "1"}


@pytest.fixture(autouse=True)
def _log_of_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loggers keep the stream of who configured them first: here it ends with the test."""
    monkeypatch.setattr("agent.cli.uninstall.configure", lambda *_: None)
    with structlog.testing.capture_logs():
        yield


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ModelWorld]:
    """An API server with this Node, on which an agent wrote."""
    async with model_world(tmp_path) as made:
        fields = {"f:metadata": {"f:annotations": {f"f:{REGISTER}": {}, f"f:{OWN}": {}}}}
        managed = [{"manager": "hami-agent", "fieldsV1": fields}]
        metadata = {"name": NODE, "annotations": dict(NOTES), "managedFields": managed}
        made.store.create("nodes", {"metadata": metadata})
        yield made


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "run").mkdir()
    return [
        *("--kubeconfig", str(tmp_path / "kubeconfig"), "--node-name", NODE),
        *("--run-dir", str(tmp_path / "run"), "--state-dir", str(tmp_path / "state")),
        *("--hook-path", str(tmp_path / "hook"), "--device-config", "", "--nodeconfig", ""),
    ]


async def uninstalled(*words: str) -> int:
    """The exit code of the verb, beside the server of the test."""
    return await asyncio.to_thread(dispatch, ["uninstall", *words], {})


async def test_what_goes_and_what_stays_is_told_and_a_second_call_finds_nothing(
    world: ModelWorld, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert 0 == await uninstalled(*flags)

    assert {MUTEX_LOCK: "a", "seen": "1"} == world.node_annotations()
    assert [
        f"{NODE}: removed {OWN}, {REGISTER}",
        f"{NODE}: left {MUTEX_LOCK}: it is the lock of HAMi's scheduler",
        f"this host: left {tmp_path}/run: goes with the next boot; or remove it",
    ] == capsys.readouterr().out.splitlines()
    assert 0 == await uninstalled(*flags)
    assert "nothing of the agent's was found" in capsys.readouterr().out


async def test_the_same_as_json(
    world: ModelWorld, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    world.edit_node({HANDSHAKE: "Reported_by somebody else"})

    assert 0 == await uninstalled(*flags, "-o", "json")

    document = json.loads(capsys.readouterr().out)
    (node,) = document["nodes"]
    assert ("Uninstallation", True, "") == (document["kind"], document["ok"], document["refusal"])
    assert ([OWN], {REGISTER, HANDSHAKE, MUTEX_LOCK}) == (node["removed"], node["left"].keys())
    assert [f"{tmp_path}/run"] == list(document["leftOnHost"])


async def test_while_an_agent_runs_nothing_is_changed(
    world: ModelWorld, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lock = LockFile(tmp_path / "run/lock")
    assert lock.try_take()

    assert 1 == await uninstalled(*flags, "--force")

    lock.release()
    assert "an agent runs on this host" in capsys.readouterr().err
    assert world.node_annotations() == NOTES


async def test_while_pods_with_gpus_run_it_must_be_forced(
    world: ModelWorld, flags: list[str], capsys: pytest.CaptureFixture[str]
):
    for name in "abcde":
        world.create_pod(name)

    assert 1 == await uninstalled(*flags, "-o", "json")

    refusal = json.loads(capsys.readouterr().out)["refusal"]
    assert "/a, " in refusal
    assert "and 2 more" in refusal
    assert world.node_annotations() == NOTES
    assert 0 == await uninstalled(*flags, "--force")
    assert REGISTER not in world.node_annotations()


async def test_a_right_that_is_missing_is_told_and_ends_with_1(
    world: ModelWorld, flags: list[str], capsys: pytest.CaptureFixture[str]
):
    world.use_token("other")

    assert 1 == await uninstalled(*flags)

    assert "grant this right" in capsys.readouterr().err


async def test_another_nodes_name_ends_with_4_and_no_server_with_3(
    world: ModelWorld, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    world.delete_node()
    assert 4 == await uninstalled(*flags)
    await world.begin_outage()
    assert 3 == await uninstalled(*flags)
    assert 3 == await uninstalled(*flags, "--kubeconfig", str(tmp_path / "none"))
    assert "give the path of a readable kubeconfig" in capsys.readouterr().err


def test_refused_settings_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.yaml").write_text("sharing: {splitCount: many}\n")
    words = ["--config", str(tmp_path / "config.yaml"), "--state-dir", str(tmp_path)]

    assert 1 == dispatch(["uninstall", *words], {})

    assert "config.yaml:1:" in capsys.readouterr().err


def test_plain_mode_has_written_nothing_to_a_node(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "hook/vgpu").mkdir(parents=True)

    assert 0 == dispatch(["uninstall", *flags, "--scheduler", "none"], {})

    out = capsys.readouterr().out
    assert "nothing of the agent's was found" in out
    assert f"left {tmp_path}/hook/vgpu: mounted in containers" in out


@pytest.mark.parametrize(
    "words", [["--all-nodes"], ["--all-nodes", "--namespace", "a"], ["--selector", "a=b"]]
)
def test_all_nodes_need_to_know_the_agents_pods(
    words: list[str], capsys: pytest.CaptureFixture[str]
):
    assert 2 == dispatch(["uninstall", *words], {})
    assert "go together" in capsys.readouterr().err


async def test_all_nodes_are_told_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    async with model_world(tmp_path, "admin") as world:
        for name in ("a", "b"):
            world.store.create("nodes", {"metadata": {"name": name, "annotations": {OWN: "1"}}})
        # The model evaluates no selector of labels; tests/peers asks the real server with one.
        monkeypatch.setattr("agent.host.kube.leftovers.KubeLeftovers.agents", _none)
        words = ("--all-nodes", "--namespace", "gpus", "--selector", "app=agent")

        # Settings that an agent would refuse do not keep it from being uninstalled.
        code = await asyncio.to_thread(
            dispatch,
            ["uninstall", *words, "--split-count", "many"],
            {"KUBECONFIG": str(tmp_path / "kubeconfig")},
        )

    assert 0 == code
    assert [f"{name}: removed {OWN}" for name in "ab"] == capsys.readouterr().out.splitlines()


async def _none(*_: object) -> dict[str, str]:
    return {}
