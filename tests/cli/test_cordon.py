"""`cordon` and `uncordon`: one annotation of the Node, changed once and only as it was seen."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.cli.main import dispatch
from agent.cluster import CORDON, HANDSHAKE, REGISTER
from agent.hami.annotations import RegisteredGpu, encode_json
from agent.kube.objects import KubeApi
from tests.builders import G1, G2, NODE
from tests.fakes.kubeworld import ModelWorld, model_world

pytestmark = pytest.mark.looptime(False)

REPORT = encode_json(
    [
        RegisteredGpu(uuid, index, 10, 81559, 100, "NVIDIA H100", 0, "hami-core", healthy=True)
        for index, uuid in enumerate((G1, G2))
    ]
)


@contextlib.asynccontextmanager
async def a_world(folder: Path, user: str = "admin", **notes: str) -> AsyncIterator[ModelWorld]:
    async with model_world(folder, user) as world:
        world.create_node({REGISTER: REPORT, "kept": "1", **notes})
        yield world


async def run(world: ModelWorld, *words: str) -> int:
    flags = ["--node", NODE, "--kubeconfig", str(world.kubeconfig)]
    return await asyncio.to_thread(dispatch, [*words, *flags], {})


@pytest.mark.parametrize("name", ["1", G2, G2.lower()])
async def test_a_gpu_is_cordoned_and_uncordoned_by_index_or_uuid(name, tmp_path, capsys):
    async with a_world(tmp_path) as world:
        assert 0 == await run(world, "cordon", name)
        cordoned = dict(world.node_annotations())
        assert 0 == await run(world, "uncordon", name)

        assert {REGISTER: REPORT, "kept": "1", CORDON: G2} == cordoned
        assert {REGISTER: REPORT, "kept": "1"} == world.node_annotations()
    first, second = capsys.readouterr().out.splitlines()
    assert f"GPU 1 ({G2}) of Node {NODE} is cordoned. HAMi's scheduler" in first
    assert "pods that run there go on" in first
    assert "may place new pods on it again" in second


async def test_others_in_the_list_stay_and_the_scheduler_is_made_to_look(tmp_path):
    notes = {CORDON: " GPU-old ,,", HANDSHAKE: "Requesting_2026-11-20 10:00:00"}
    async with a_world(tmp_path, **notes) as world:
        assert 0 == await run(world, "cordon", "0")
        assert f"GPU-old,{G1}" == world.node_annotations()[CORDON]
        assert HANDSHAKE not in world.node_annotations()

        assert 0 == await run(world, "uncordon", "GPU-old")
        assert G1 == world.node_annotations()[CORDON]


@pytest.mark.parametrize(("verb", "notes"), [("cordon", {CORDON: G1}), ("uncordon", {})])
async def test_what_is_so_already_is_said_and_not_written(verb, notes, tmp_path, capsys):
    async with a_world(tmp_path, **notes) as world:
        before = world.store.get("nodes", "", NODE)["metadata"]["resourceVersion"]
        assert 0 == await run(world, verb, "0")

        assert before == world.store.get("nodes", "", NODE)["metadata"]["resourceVersion"]
        assert {"get"} == {verb for (_, verb, _) in world.model.journal.counts}
    state = "was cordoned already" if notes else "was not cordoned"
    assert f" {state}; nothing was changed\n" in capsys.readouterr().out


async def test_an_unknown_gpu_names_the_known_ones(tmp_path, capsys):
    async with a_world(tmp_path) as world:
        assert 4 == await run(world, "cordon", "7")
        world.edit_node({CORDON: "GPU-\x1b[2J"})
        assert 4 == await run(world, "cordon", "None")
        world.edit_node({REGISTER: None, CORDON: None})
        assert 4 == await run(world, "cordon", "7")
        world.delete_node()
        assert 4 == await run(world, "cordon", "7")

    known, odd, unreported, no_node = capsys.readouterr().err.splitlines()
    assert f"Node {NODE} has no GPU 7: it has 0 ({G1}), 1 ({G2})" in known
    assert f"1 ({G2}), GPU-" in odd
    assert "\x1b" not in odd, "nothing that a terminal obeys"
    assert f"no readable {REGISTER}" in unreported
    assert f"knows no Node {NODE}" in no_node


async def test_without_an_api_server_it_says_so(tmp_path, capsys):
    async with a_world(tmp_path) as world:
        await world.begin_outage()
        assert 3 == await run(world, "cordon", "0")
    assert "no answer from the API server" in capsys.readouterr().err


@pytest.mark.parametrize(("changes", "code"), [(1, 0), (4, 0), (5, 1)])
async def test_what_others_write_between_read_and_write_is_kept_and_the_write_made_again(
    changes, code, tmp_path, monkeypatch, capsys
):
    plain, others = KubeApi.get_node, [f"GPU-{number}" for number in range(changes)]

    async def get_node(api: KubeApi):
        seen = await plain(api)
        if others:
            world.edit_node({CORDON: others.pop()})
        return seen

    async with a_world(tmp_path) as world:
        monkeypatch.setattr(KubeApi, "get_node", get_node)
        assert code == await run(world, "cordon", "0")

        assert f"GPU-0{f',{G1}' * (code == 0)}" == world.node_annotations()[CORDON]
    assert ("patch nodes" in capsys.readouterr().err) is (code == 1)


async def test_json_says_what_was_done(tmp_path, capsys):
    async with a_world(tmp_path) as world:
        assert 0 == await run(world, "cordon", "0", "-o", "json")

    document = json.loads(capsys.readouterr().out)
    assert ("hami-agent/v1", "Cordon") == (document["apiVersion"], document["kind"])
    assert {"node": NODE, "gpu": 0, "uuid": G1, "cordoned": True, "changed": True} == document[
        "data"
    ]
    assert document["source"].startswith("API server by ")


async def test_the_node_comes_from_the_agents_settings_and_the_kubeconfig_from_where_kubectl_has_it(
    tmp_path, capsys
):
    async with a_world(tmp_path) as world:
        environ = {"NODE_NAME": NODE, "KUBECONFIG": str(world.kubeconfig)}
        assert 0 == await asyncio.to_thread(dispatch, ["cordon", "0"], environ)
        (tmp_path / ".kube").mkdir()
        world.kubeconfig.rename(tmp_path / ".kube/config")
        environ = {"NODE_NAME": NODE, "HOME": str(tmp_path)}
        assert 0 == await asyncio.to_thread(dispatch, ["cordon", "1"], environ)
        # That of the agent's settings is of an account that may not write a cordon.
        environ = {"NODE_NAME": NODE, "HAMI_AGENT_NODE_KUBECONFIG": f"{tmp_path}/.kube/config"}
        assert 3 == await asyncio.to_thread(dispatch, ["cordon", "1"], environ)

        assert f"{G1},{G2}" == world.node_annotations()[CORDON]


async def test_a_list_of_kubeconfigs_and_a_context_are_read_as_by_kubectl(tmp_path, capsys):
    async with a_world(tmp_path) as world:
        environ = {"KUBECONFIG": f"/none:{world.kubeconfig}"}
        words = ["cordon", "0", "--node", NODE]
        assert 3 == await asyncio.to_thread(dispatch, [*words, "--context", "other"], environ)
        assert 0 == await asyncio.to_thread(dispatch, words, environ)

        assert G1 == world.node_annotations()[CORDON]
    assert "has no context other" in capsys.readouterr().err
