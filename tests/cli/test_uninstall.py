"""`uninstall`: a line for each Node, an exit code, and the same as JSON.

tests/app/test_uninstalling.py has what it waits for; tests/peers asks the real server.
"""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agent.cli.main import dispatch
from agent.cluster import CORDON, HANDSHAKE, MUTEX_LOCK, REGISTER, SCORE
from agent.errors import ApiError, ApiForbidden, ApiNotFound
from agent.hami.region import V1_2
from agent.host.system import LockFile
from agent.kube.reader import KubeLeftovers, NodeLeftovers
from tests.builders import NODE, RESOURCE
from tests.fakes.kubeworld import ModelWorld, model_world
from tests.hami_regions import read_bytes
from tests.host.region_dirs import OTHER, poke, with_region

pytestmark = pytest.mark.looptime(False)
OWN = ("hami-agent/0", "hami-agent/1")
KEPT = {MUTEX_LOCK: "a", CORDON: "", "seen": "1"}
GONE = (REGISTER, SCORE, HANDSHAKE, *OWN)
NOTES = {**dict.fromkeys(GONE, "1"), **KEPT}
RECENT = V1_2.tail + 8
"""Where recent_kernel is."""


def node_object(name: str, ready: str = "True", **status: Any) -> dict[str, Any]:
    """A Node on which an agent wrote."""
    kinds = {"Other": "Unknown", "Ready": ready, "GpuDegraded": "True"}
    conditions = [{"type": kind, "status": value} for kind, value in kinds.items()]
    return {
        "metadata": {"name": name, "annotations": dict(NOTES)},
        "status": {"conditions": conditions, **status},
    }


def create_pod(world: ModelWorld, name: str, node: str = NODE, **more: Any) -> None:
    """A pod with one slice."""
    container = {"name": "main", "resources": {"limits": {RESOURCE: "1"}}}
    metadata = {"name": name, "namespace": "gpus", "labels": {"app": name.partition("-")[0]}}
    spec = {"nodeName": node, "containers": [container]}
    world.store.create("pods", {"metadata": metadata, "spec": spec, **more})


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ModelWorld]:
    """An API server with this Node, on which an agent wrote."""
    async with model_world(tmp_path) as made:
        made.store.create("nodes", node_object(NODE))
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


async def test_what_goes_is_told_and_a_second_call_finds_nothing(world, flags, capsys):
    assert 0 == await uninstalled(*flags)

    assert world.node_annotations() == KEPT
    conditions = world.store.get("nodes", "", NODE)["status"]["conditions"]
    assert ["Other", "Ready"] == [one["type"] for one in conditions]
    removed = f"{NODE}: removed {', '.join(GONE)}, condition GpuDegraded"
    assert [removed] == capsys.readouterr().out.splitlines()
    assert 0 == await uninstalled(*flags)
    assert "nothing of the agent's was found" in capsys.readouterr().out


async def test_while_an_agent_runs_nothing_is_changed(world, flags, tmp_path, capsys):
    lock = LockFile(tmp_path / "run/lock")
    assert lock.try_take()

    assert 1 == await uninstalled(*flags, "--force")

    lock.release()
    assert "an agent runs on this host" in capsys.readouterr().err
    assert world.node_annotations() == NOTES


def serving(ready: str, amount: Any) -> Callable[[ModelWorld], object]:
    """The kubelet reports so many slices; `ready`: whether it lives."""
    status = node_object(NODE, ready, allocatable={RESOURCE: amount})["status"]
    return lambda world: world.store.update("nodes", "", NODE, lambda one: one | {"status": status})


def with_pods(world: ModelWorld) -> None:
    for name in "abcde":
        create_pod(world, name)
    create_pod(world, "over", status={"phase": "Succeeded"})
    create_pod(world, "far", "another-node")


OTHER_RESOURCE = ("--resource-name", "other.com/gpu")


@pytest.mark.parametrize(
    ("arrange", "words", "refusal"),
    [
        (with_pods, (), "(gpus/a, gpus/b, gpus/c and 2 more)"),
        (with_pods, OTHER_RESOURCE, ""),
        (serving("True", "8"), (), ""),
    ],
)
async def test_while_pods_are_there_it_must_be_forced(
    world, flags, monkeypatch, capsys, arrange, words, refusal
):
    arrange(world)
    monkeypatch.setattr("agent.cli.node.WAIT", 0.0)

    assert int(bool(refusal)) == await uninstalled(*flags, *words, "-o", "json")

    told = json.loads(capsys.readouterr().out)["data"]["refusal"]
    assert refusal in told
    assert bool(refusal) == bool(told)
    assert (NOTES if refusal else KEPT) == world.node_annotations()
    assert 0 == await uninstalled(*flags, "--force")
    assert world.node_annotations() == KEPT
    assert 0 == await uninstalled(*flags), "there is nothing left to refuse"


async def test_what_cannot_be_read_is_told_and_has_its_exit_code(world, flags, tmp_path, capsys):
    world.delete_node()
    assert 4 == await uninstalled(*flags)
    world.use_token("other")
    assert 1 == await uninstalled(*flags)
    assert "answered 403" in capsys.readouterr().err
    await world.begin_outage()
    assert 3 == await uninstalled(*flags)
    assert 3 == await uninstalled(*flags, "--kubeconfig", str(tmp_path / "none"))
    assert "give the path of a readable kubeconfig" in capsys.readouterr().err


async def test_no_agent_starts_while_the_node_is_cleaned(world, flags, monkeypatch, tmp_path):
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


async def test_a_run_directory_that_cannot_be_entered_may_have_an_agent(
    world, flags, tmp_path, capsys
):
    (tmp_path / "closed").touch()

    assert 1 == await uninstalled(*flags, "--run-dir", str(tmp_path / "closed/run"), "--force")

    assert f"{tmp_path}/closed/run/lock cannot be locked: Not a" in capsys.readouterr().err
    assert world.node_annotations() == NOTES


@pytest.mark.parametrize("mode", ["hami", "plain", "an outage"])
async def test_containers_that_a_killed_agent_held_back_are_released(world, flags, tmp_path, mode):
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
    assert world.node_annotations() == (KEPT if mode == "hami" else NOTES)


async def test_regions_that_cannot_be_looked_at_are_told_and_stop_nothing(
    world, flags, tmp_path, capsys
):
    (tmp_path / "hook/vgpu").mkdir(parents=True)
    (tmp_path / "hook/vgpu/containers").touch()

    assert 0 == await uninstalled(*flags)

    assert "containers that an agent held back may wait for ever" in capsys.readouterr().err


EVERYWHERE = ("--all-nodes", "--namespace", "gpus", "--selector", "app=agent")


@pytest_asyncio.fixture
async def two(tmp_path: Path) -> AsyncIterator[ModelWorld]:
    """Two Nodes on which an agent wrote."""
    async with model_world(tmp_path, "admin") as made:
        for name in "ab":
            made.store.create("nodes", node_object(name))
        yield made


async def everywhere(world: ModelWorld, *words: str) -> int:
    """The exit code of the verb for all Nodes."""
    environ = {"KUBECONFIG": str(world.kubeconfig)}
    return await asyncio.to_thread(dispatch, ["uninstall", *EVERYWHERE, *words], environ)


async def test_each_node_is_told_before_the_next_is_begun(two, monkeypatch):
    class Paper(io.StringIO):
        def flush(self) -> None:
            seen.append(self.getvalue())

    seen: list[str] = []
    monkeypatch.setattr("sys.stdout", Paper())
    removed = f"removed {', '.join(GONE)}, condition GpuDegraded\n"

    assert 0 == await everywhere(two)

    assert [f"a: {removed}", f"a: {removed}b: {removed}"] == seen[:2]


@pytest.mark.parametrize(
    ("error", "code", "refusal", "failures"),
    [
        (ApiForbidden("no right", status=403), 1, "", [("a", "no right"), ("b", "")]),
        (ApiError("bad gateway", status=502), 1, "", [("a", "bad gateway"), ("b", "")]),
        (ApiNotFound("gone", status=404), 0, "", [("b", "")]),
        # Each other Node would wait for it again.
        (ApiError("silent"), 3, "silent", []),
    ],
)
async def test_a_node_that_fails_is_told_and_the_others_are_cleaned(
    two, monkeypatch, capsys, error, code, refusal, failures
):
    plain = KubeLeftovers.clean

    async def clean(api: KubeLeftovers, node: NodeLeftovers) -> None:
        if node.name == "a":
            raise error
        await plain(api, node)

    monkeypatch.setattr(KubeLeftovers, "clean", clean)

    assert code == await everywhere(two, "-o", "json")

    told = capsys.readouterr()
    document = json.loads(told.out)["data"]
    assert (code == 0, refusal) == (document["ok"], document["refusal"])
    assert failures == [(node["node"], node["failure"]) for node in document["nodes"]]
    assert refusal in told.err
    is_clean = KEPT == two.store.get("nodes", "", "b")["metadata"]["annotations"]
    assert bool(failures) == is_clean
    assert code == await everywhere(two)
    assert (f"a: something is left: {error}" in capsys.readouterr().out) == (code == 1)


async def test_agents_pods_and_plugins_keep_their_nodes(two, monkeypatch, capsys):
    monkeypatch.setattr("agent.cli.node.WAIT", 0.0)
    offered = (("True", "80"), ("False", "1k"), ("Unknown", "8"), ("True", "0"), ("True", "many"))
    for name, (ready, amount) in zip("cdefgh", (*offered, ("Unknown", "0")), strict=True):
        two.store.create(
            "nodes", node_object(name, ready, allocatable={"gpus.example/one": amount})
        )
    create_pod(two, "agent-1", "a")
    create_pod(two, "another-1", "b")
    create_pod(two, "agent-2", "h")  # nothing runs it
    create_pod(two, "agent-3", "")

    assert 1 == await everywhere(two, "--resource-name", "gpus.example/one")

    out = sorted(capsys.readouterr().out.splitlines())
    assert out[0].startswith("a: something is left: its agent has not ended")
    assert "(pod agent-1): clean it when" in out[0]
    skipped = "skipped: a device plugin serves gpus.example/one there"
    assert [f"c: {skipped}", f"d: {skipped}"] == out[2:4]
    assert out[-1].startswith("no Node yet: something is left: its agent has not ended")
    kept = [two.store.get("nodes", "", name)["metadata"]["annotations"] for name in "abcdefgh"]
    assert [NOTES, KEPT, NOTES, NOTES, KEPT, KEPT, KEPT, KEPT] == kept


async def test_an_agent_that_ends_meanwhile_is_waited_for(two, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("agent.cli.node._say", said.append)
    monkeypatch.setattr("agent.cli.node.PAUSE", 0.05)
    create_pod(two, "agent-1", "a")
    async with asyncio.TaskGroup() as group:
        cleaning = group.create_task(everywhere(two))
        while not said:  # noqa: ASYNC110 -- the verb has a loop of its own
            await asyncio.sleep(0.02)
        two.store.delete("pods", "gpus", "agent-1", grace=0)

    assert 0 == cleaning.result()
    assert ["waiting up to 90 s for agents and plugins to end: a"] == said
    assert two.store.get("nodes", "", "a")["metadata"]["annotations"] == KEPT
