"""`uninstall`: a line for each Node and for what stays, an exit code, and the same as JSON."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent.cli.main import dispatch
from agent.cluster import HANDSHAKE, MUTEX_LOCK, REGISTER
from agent.hami.region import V1_2
from agent.host.process import LockFile
from agent.kube.leftovers import KubeLeftovers, NodeLeftovers
from tests.builders import NODE, RESOURCE
from tests.fakes.kubeworld import ModelWorld, model_world
from tests.hami_regions import read_bytes
from tests.host.region_dirs import OTHER, poke, with_region

pytestmark = pytest.mark.looptime(False)
OWN = "hami-agent/gpus"
NOTES = {REGISTER: "[]", OWN: "1", MUTEX_LOCK: "a", "seen": "1"}


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ModelWorld]:
    """An API server with this Node, on which an agent wrote."""
    async with model_world(tmp_path) as made:
        degraded = {"conditions": [{"type": "GpuDegraded", "status": "True"}]}
        metadata = {"name": NODE, "annotations": dict(NOTES)}
        made.store.create("nodes", {"metadata": metadata, "status": degraded})
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
    assert [] == world.store.get("nodes", "", NODE)["status"]["conditions"]
    assert [
        f"{NODE}: removed {REGISTER}, {OWN}, condition GpuDegraded",
        f"this host: left {tmp_path}/run: the next boot removes it; or remove it now",
    ] == capsys.readouterr().out.splitlines()
    assert 0 == await uninstalled(*flags)
    assert "nothing of the agent's was found" in capsys.readouterr().out


async def test_the_same_as_json(
    world: ModelWorld, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    world.edit_node({HANDSHAKE: "Reported_by somebody else"})

    assert 0 == await uninstalled(*flags, "-o", "json")

    document = json.loads(capsys.readouterr().out)
    data = document["data"]
    (node,) = data["nodes"]
    assert ("Uninstallation", True, "") == (document["kind"], data["ok"], data["refusal"])
    assert {REGISTER, OWN, HANDSHAKE, "condition GpuDegraded"} == set(node["removed"])
    assert ("", "") == (node["skipped"], node["failure"])
    assert [f"{tmp_path}/run"] == list(data["leftOnHost"])


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

    refusal = json.loads(capsys.readouterr().out)["data"]["refusal"]
    assert "/a, " in refusal
    assert "and 2 more" in refusal
    assert world.node_annotations() == NOTES
    assert 0 == await uninstalled(*flags, "--force")
    assert REGISTER not in world.node_annotations()
    assert 0 == await uninstalled(*flags), "there is nothing left to refuse"


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


RECENT = V1_2.tail + 8
"""Where recent_kernel is."""


def serve(world: ModelWorld, resource: str = RESOURCE) -> None:
    """A kubelet says that somebody serves here."""
    status = {
        "conditions": [{"type": "Ready", "status": "True"}],
        "allocatable": {resource: "80"},
    }
    world.store.update("nodes", "", NODE, lambda node: node | {"status": status})


async def test_while_a_plugin_serves_the_node_it_must_be_forced(
    world: ModelWorld,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    serve(world)
    monkeypatch.setattr("agent.cli.uninstall.VACATING", 0.0)

    assert 1 == await uninstalled(*flags)

    said = capsys.readouterr().err
    assert f"a device plugin serves {RESOURCE} on the Node {NODE}" in said
    assert "stop it first; --force uninstalls anyway" in said
    assert world.node_annotations() == NOTES
    assert 0 == await uninstalled(*flags, "--force")
    assert {MUTEX_LOCK: "a", "seen": "1"} == world.node_annotations()


async def test_who_serves_another_resource_is_in_nobodys_way(world: ModelWorld, flags: list[str]):
    serve(world, "other.com/gpu")

    assert 0 == await uninstalled(*flags)


async def test_the_wait_for_the_kubelet_is_told(
    world: ModelWorld,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    serving = [True, True, False, False]

    async def node(*_: object) -> NodeLeftovers:
        return NodeLeftovers(NODE, (REGISTER,), has_kubelet=True, served=serving.pop(0))

    monkeypatch.setattr(KubeLeftovers, "node", node)
    monkeypatch.setattr("agent.cli.uninstall.PAUSE", 0.0)

    assert 0 == await uninstalled(*flags, "-o", "json")

    assert f"waiting up to 30 s for the kubelets to report that no plugin serves: {NODE}" in (
        capsys.readouterr().err
    )
    assert [] == serving
    assert REGISTER not in world.node_annotations()


async def test_without_a_run_directory_the_node_is_cleaned_and_none_is_made(
    world: ModelWorld, flags: list[str], tmp_path: Path
):
    assert 0 == await uninstalled(*flags, "--run-dir", str(tmp_path / "none/run"))

    assert REGISTER not in world.node_annotations()
    assert not (tmp_path / "none").exists()


async def test_no_agent_starts_while_the_node_is_cleaned(
    world: ModelWorld, flags: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    plain, taken = KubeLeftovers.clean, list[bool]()

    async def clean(api: KubeLeftovers, node: NodeLeftovers) -> None:
        taken.append(LockFile(tmp_path / "run/lock").try_take())
        await plain(api, node)

    monkeypatch.setattr(KubeLeftovers, "clean", clean)

    assert 0 == await uninstalled(*flags)

    assert [False] == taken
    after = LockFile(tmp_path / "run/lock")
    assert after.try_take()
    after.release()


async def test_pods_of_the_settings_own_resource_hold_it_up_and_no_others(
    world: ModelWorld, flags: list[str]
):
    world.create_pod("a")

    assert 0 == await uninstalled(*flags, "--resource-name", "other.com/gpu")


def deny(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What is in this folder cannot be looked at."""
    plain = Path.is_dir

    def is_dir(path: Path) -> bool:
        if folder in path.parents:
            raise PermissionError(13, "Permission denied")
        return plain(path)

    monkeypatch.setattr(Path, "is_dir", is_dir)


async def test_a_run_directory_that_cannot_be_looked_at_is_a_sentence(
    world: ModelWorld,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    deny(monkeypatch, tmp_path / "closed")

    assert 1 == await uninstalled(*flags, "--run-dir", str(tmp_path / "closed/run"))

    assert f"{tmp_path}/closed/run cannot be accessed" in capsys.readouterr().err
    assert world.node_annotations() == NOTES


async def test_a_path_that_cannot_be_looked_at_afterwards_is_told(
    world: ModelWorld,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    deny(monkeypatch, tmp_path / "closed")

    assert 0 == await uninstalled(*flags, "--state-dir", str(tmp_path / "closed/state"))

    said = capsys.readouterr().out
    assert f"left {tmp_path}/closed/state: it may exist: it cannot be accessed" in said
    assert REGISTER not in world.node_annotations()


@pytest.mark.parametrize("mode", ["hami", "plain", "an outage"])
async def test_containers_that_a_killed_agent_held_back_are_released(
    world: ModelWorld, flags: list[str], tmp_path: Path, mode: str
):
    held = with_region(tmp_path / "hook")
    free = with_region(tmp_path / "hook", OTHER)
    poke(held, RECENT, "<i", -1)
    before = free.read_bytes()
    if mode == "an outage":
        await world.begin_outage()

    expected = 3 if mode == "an outage" else 0
    assert expected == await uninstalled(*flags, *["--scheduler", "none"] * (mode == "plain"))

    assert 0 == read_bytes(held.read_bytes()).region.recent_kernel
    assert before == free.read_bytes()


async def test_regions_that_cannot_be_looked_at_are_told_and_stop_nothing(
    world: ModelWorld, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "hook/vgpu").mkdir(parents=True)
    (tmp_path / "hook/vgpu/containers").touch()

    assert 0 == await uninstalled(*flags)

    assert "containers that an agent held back may wait for ever" in capsys.readouterr().err
