"""`run --observe` beside the plugin that serves the node: it looks, tells, and touches nothing."""

import asyncio
import contextlib
import os

from agent import cluster as annotations
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.audit import counted
from tests.peers.lab.clockwork import REGISTERED, kubelet_said, wall
from tests.peers.lab.cluster import ACCOUNT
from tests.peers.lab.config_files import NODE_CONFIG, node_config, open_files
from tests.peers.lab.faces import answers, page
from tests.peers.lab.grants import expected_inside, seen_inside
from tests.peers.lab.node_state import gpus_of, notes_of
from tests.peers.lab.pods import a_telling_pod, run, until_settled
from tests.peers.lab.settings import QUIET, ask_to_reload
from tests.peers.lab.tidy import NODE_PATH
from tests.peers.lab.waiting import until, until_answer

WOULD_WRITE = "observe.would_write"
WRITES = f"[!]observed degraded: would write {annotations.REGISTER}; the log says what"
WRITES_NOTHING = "[+]observed ok"


async def observer(cluster, *flags):
    """An agent that observes; as another user, so that the audit log tells them apart."""
    return await cluster.start_agent("--observe", *flags, user=ACCOUNT, name="observer")


async def until_it_says(agent, *lines):
    """Return once its readiness probe passes with those lines. Raises TimeoutError."""

    async def is_said():
        code, text = await page(agent, "/readyz?verbose")
        return code == 200 and set(lines) <= set(text.splitlines())

    await until_answer(is_said, 20.0, agent.part.tail)


def registered_plugins(cluster):
    """What lies in the kubelet's plugin directory: names, and which file each is.

    The kubelet's own checkpoint changes with each pod.
    """
    with os.scandir(cluster.kubelet.plugins) as found:
        return {
            one.name: (one.inode(), one.stat().st_ctime_ns)
            for one in found
            if "checkpoint" not in one.name
        }


def on_disk(cluster):
    """What an agent that serves keeps: its state byte by byte, and containers' directories."""
    state = cluster.space.view / "var/lib/hami-agent"
    names = sorted(path.name for path in cluster.hook.glob("containers/*"))
    return {path.name: path.read_bytes() for path in state.iterdir()}, names


def without_handshake(notes):
    """The annotations less those that HAMi's scheduler writes at any time, one for each vendor."""
    return {
        name: text for name, text in notes.items() if not name.startswith(annotations.HANDSHAKE)
    }


@contextlib.asynccontextmanager
async def untouched(cluster):
    """What an observer may not touch is, after the block, as it was before it."""
    plugins = registered_plugins(cluster)
    notes = without_handshake(notes_of(await cluster.api.get(NODE_PATH)))
    mark, since = cluster.plane.audit.mark(), wall()
    yield
    await asyncio.sleep(QUIET)  # what is claimed is about this time, too
    asked = cluster.plane.audit.since(mark, ACCOUNT)
    assert {"watch nodes"} == counted(asked).keys(), "it reads, and nothing but the Node"
    assert plugins == registered_plugins(cluster)
    assert [] == kubelet_said(cluster, REGISTERED, since=since)
    assert notes == without_handshake(notes_of(await cluster.api.get(NODE_PATH)))


async def test_an_observer_tells_what_it_would_write_and_writes_nothing(cluster, agent):
    await until_settled(cluster, *await run(cluster, a_telling_pod(cluster, "resident")))
    kept = on_disk(cluster)
    async with untouched(cluster):
        files = open_files(cluster)
        path = files.write(NODE_CONFIG, node_config(devicesplitcount=3, devicememoryscaling=2))
        second = await observer(cluster, "--nodeconfig", str(path))
        await until_it_says(second, WRITES, "[+]report ok")
        files.write(NODE_CONFIG, node_config(devicesplitcount=6))
        ask_to_reload(second)
        await until(lambda: 2 == len(second.events(WOULD_WRITE)), 20.0, second.part.tail)
        files.write(NODE_CONFIG, node_config())
        ask_to_reload(second)
        await until_it_says(second, WRITES_NOTHING)

    told = [
        gpus_of(line["annotations"].get(annotations.REGISTER, "[]"))
        for line in second.events(WOULD_WRITE)
    ]
    assert [8 * [(3, 163118)], 8 * [(6, 81559)]] == [
        [(gpu["count"], gpu["devmem"]) for gpu in gpus] for gpus in told
    ]
    assert kept == on_disk(cluster)


async def test_beside_an_observer_pods_are_served_as_ever(cluster, agent):
    mark = cluster.plane.audit.mark()
    second = await observer(cluster, "--split-count", "3")
    await until_it_says(second, WRITES)

    await run(cluster, a_telling_pod(cluster, "beside"))
    await until_settled(cluster, "beside")
    assert expected_inside(cluster, "beside") == await seen_inside(cluster, "beside")
    assert 0 == await second.part.stop()

    assert {"watch nodes"} == counted(cluster.plane.audit.since(mark, ACCOUNT)).keys()
    assert {("beside", "main"): 1} == answers(agent)
    assert 80 == len(await cluster.kubelet.allocatable(RESOURCE))
