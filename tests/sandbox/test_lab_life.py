"""A sandbox that stays up: places, the agent's log, waiting."""

import asyncio
import shutil

import aiohttp
import pytest

from agent.sandbox.lab.child import MOST_BYTES, AgentLog
from agent.sandbox.lab.cluster import RESOURCE, Pulse, open_cluster
from agent.sandbox.lab.places import MOST_CHARACTERS, open_places
from tests.process.agent_process import options


def test_the_directory_is_short_enough_for_sockets_wherever_temporary_files_go(
    monkeypatch, tmp_path
):
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    with open_places() as places:
        assert MOST_CHARACTERS >= len(str(places.root))


def test_the_directory_goes_with_the_sandbox_unless_it_is_kept():
    with open_places() as gone:
        assert (gone.hook / "vgpu/libvgpu.so").exists()
    with open_places(keep=True) as kept:
        pass

    assert not gone.root.exists()
    assert kept.state.exists()
    shutil.rmtree(kept.root)


def test_log_lines_are_parsed_where_they_are_json():
    heard: list[int] = []
    log = AgentLog(lambda: heard.append(1))
    log.add(1.0, 7, b'{"event": "agent.starting", "node": "n"}')
    log.add(2.0, 8, b'{"event": "agent.starting"}')
    log.add(3.0, 8, b"Traceback \xff")
    log.add(4.0, 8, b"[1]")

    assert [7, 8] == [line.pid for line in log.of("agent.starting")]
    assert [{"event": "agent.starting", "node": "n"}] == [
        line.fields for line in log.of("agent.starting", 7)
    ]
    assert ["Traceback �", "[1]"] == log.last(2)
    assert 4 == len(heard)


def test_an_endless_line_is_cut():
    log = AgentLog(lambda: None)
    log.add(1.0, 7, b"x" * (MOST_BYTES + 1))

    assert [MOST_BYTES] == [len(line.text) for line in log]


async def test_who_waits_looks_again_at_every_beat():
    pulse, facts = Pulse(), list[int]()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(pulse.until(lambda: len(facts) == 2))
        for fact in (1, 2):
            await asyncio.sleep(1)
            assert not waiting.done()
            facts.append(fact)
            pulse.beat()

    assert waiting.done()


async def test_what_holds_already_is_not_waited_for():
    async with asyncio.timeout(0.1):
        await Pulse().until(lambda: True)


async def test_waiting_ends_with_its_deadline():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await Pulse().until(lambda: False)


@pytest.mark.looptime(False)
async def test_a_namespace_can_be_taken_from_the_webhook():
    async with open_cluster(options(gpus=1)) as cluster, aiohttp.ClientSession() as session:
        session.headers["Authorization"] = f"Bearer {cluster.admin_token}"
        base = f"{cluster.api.url}/api/v1/namespaces"
        label = {"metadata": {"labels": {"hami.io/webhook": "ignore"}}}
        merge = {"Content-Type": "application/merge-patch+json"}
        async with session.post(base, json={"metadata": {"name": "other"}}) as made:
            assert 201 == made.status
        async with session.patch(f"{base}/other", json=label, headers=merge) as labelled:
            assert 200 == labelled.status
        seen = {}
        for space in ("demo", "other", "never-made"):
            pod = {
                "metadata": {"name": "p"},
                "spec": {"containers": [{"name": "c", "resources": {"limits": {RESOURCE: "1"}}}]},
            }
            async with session.post(f"{base}/{space}/pods", json=pod) as created:
                seen[space] = (await created.json())["spec"].get("schedulerName")

    assert {"demo": "hami-scheduler", "other": None, "never-made": "hami-scheduler"} == seen
