"""`doctor` beside a running agent: each fault of the host is one line, and no other is."""

import asyncio
import json
import shutil
import socket

import pytest

from agent.cluster import HANDSHAKE, REGISTER
from agent.sandbox.apiserver import WRITES
from agent.sandbox.lab.child import start_child
from agent.sandbox.lab.cluster import SandboxCluster
from tests.process.agent_process import comes, offers, run
from tests.process.doctored_node import ACCOUNT, SLICES, a_node, doctored, faults, line, token_of

pytestmark = [
    pytest.mark.process,
    pytest.mark.looptime(False),
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("no_log"),
]


async def test_where_nothing_is_wrong_no_line_is(well: SandboxCluster):
    ended = await asyncio.to_thread(run, "doctor", *well.command()[1:], "-o", "json")

    findings = json.loads(ended.stdout)["data"]["findings"]
    assert ([], 0, "") == (faults(findings), ended.returncode, ended.stderr)
    assert {"P-OFFER", "P-AGENT", "P-SECOND", "P-EXCESS", "P-CLOCK", "P-LOCK", "P-PRELOAD"} <= {
        one["id"] for one in findings
    }


async def test_a_driver_that_is_gone(well: SandboxCluster):
    flags = ("--simulate", f"unix:{well.places.root}/none.sock")
    code, findings = await doctored(well, *flags)

    assert [("P-DRIVER", "wrong")] == faults(findings)
    assert "no simulated hardware answers" in line(findings, "P-DRIVER")["said"]
    assert 1 == code


async def test_a_kubelet_without_a_socket():
    async with a_node() as cluster:
        (cluster.places.plugins / "kubelet.sock").unlink()
        code, findings = await doctored(cluster)

    assert [("P-KUBELET", "wrong")] == faults(findings)
    assert "no socket of a kubelet is there" == line(findings, "P-KUBELET")["said"]
    assert 1 == code


async def test_what_hamis_plugin_left_and_a_hook_directory_that_everybody_may_write():
    async with a_node() as cluster:
        path = cluster.places.plugins / "nvidia-gpu.sock"
        with socket.socket(socket.AF_UNIX) as theirs:
            theirs.bind(str(path))
        cluster.places.hook.chmod(0o777)
        code, findings = await doctored(cluster)

    assert [("P-LEFTOVERS", "note"), ("P-PATHS", "wrong")] == faults(findings)
    assert str(path) == line(findings, "P-LEFTOVERS")["subject"]
    found = line(findings, "P-PATHS")
    assert str(cluster.places.hook) == found["subject"]
    assert "every user may write there (mode 0777)" == found["said"]
    assert 1 == code


async def test_a_second_agent_that_serves_the_same_kubelet():
    async with a_node() as cluster:
        root = cluster.places.root
        half_written = shutil.ignore_patterns(".*")
        shutil.copytree(cluster.places.state, root / "state2", ignore=half_written)
        more = ("--run-dir", f"{root}/run2", "--state-dir", f"{root}/state2")
        child = await start_child((*cluster.command(), *more), cluster.environment(), cluster.log)
        cluster.children.insert(0, child)
        cluster.tasks.create_task(child.read())
        assert await comes(lambda: len(cluster.kubelet.history.of("registered")) > 1)
        assert await offers(cluster, SLICES)
        code, findings = await doctored(cluster)

    assert [("P-SECOND", "wrong")] == faults(findings)
    assert "2 agents serve the kubelet of this node" == line(findings, "P-SECOND")["said"]
    assert 1 == code


async def test_a_library_that_others_may_write():
    async with a_node() as cluster:
        (cluster.places.hook / "vgpu/ld.so.preload").write_text("/opt/other.so\n")
        (cluster.places.hook / "vgpu/libvgpu.so").chmod(0o666)
        assert await offers(cluster, 0)  # no container would load it, so the agent withholds
        assert await comes(lambda: '"health":true' not in cluster.node_annotations()[REGISTER])
        code, findings = await doctored(cluster)

    assert [("P-PRELOAD", "wrong"), ("P-PRELOAD", "wrong")] == faults(findings)
    open_one, other = [one for one in findings if one["id"] == "P-PRELOAD"]
    assert "mode 0666" in open_one["said"]
    assert "names '/opt/other.so'" in other["said"]
    assert 1 == code


async def test_refused_settings_leave_the_rest_to_the_last_good_ones():
    async with a_node("sharing: {splitCount: 10}\n") as cluster:
        good = cluster.places.state / "settings.json"
        assert await comes(good.exists)
        cluster.places.config.write_text("sharing: {splitCount: many}\n")
        code, findings = await doctored(cluster)
        pre, only = await doctored(cluster, "--pre")

    assert [("P-SETTINGS", "wrong")] == faults(findings)
    assert "config.yaml:1:" in line(findings, "P-SETTINGS")["said"]
    assert {"P-OFFER", "P-LOCK", "P-AGENT"} <= {one["id"] for one in findings}
    assert ["P-SETTINGS"] == [one["id"] for one in only]
    assert (1, 1) == (code, pre)


async def test_an_agent_that_does_not_run():
    async with a_node() as cluster:
        await cluster.stop_agent()
        assert await offers(cluster, 0)
        code, findings = await doctored(cluster)

    assert [("P-AGENT", "wrong")] == faults(findings)
    assert line(findings, "P-AGENT")["said"].startswith("no agent answers")
    assert "(follows from P-AGENT)" in line(findings, "P-OFFER")["said"]
    assert 1 == code


def asked_by(cluster: SandboxCluster, user: str) -> int:
    """How many requests the user made: doctor as another one than the agent, which may write."""
    return sum(count for (who, _, _), count in cluster.api.journal.counts.items() if who == user)


async def test_the_groups_choose_what_is_looked_at(well: SandboxCluster):
    before = asked_by(well, ACCOUNT)
    _, few = await doctored(well, "--only", "paths,library", *token_of(well, ACCOUNT))
    asked = asked_by(well, ACCOUNT) - before
    _, most = await doctored(well, "--skip", "api,scheduler")

    assert {"paths", "library"} == {one["group"] for one in few}
    assert 0 == asked
    assert {"config", "driver", "kubelet", "agent", "library", "paths"} == {
        one["group"] for one in most
    }


def writes_of(cluster: SandboxCluster, user: str) -> int:
    """How many requests for a change the user made; a review changes nothing."""
    return sum(
        count
        for (who, verb, resource), count in cluster.api.journal.counts.items()
        if who == user and verb in WRITES and "reviews" not in resource
    )


def settled(cluster: SandboxCluster) -> dict[str, str]:
    """The Node's annotations but the handshake, which the scheduler writes again and again."""
    return {key: text for key, text in cluster.node_annotations().items() if key != HANDSHAKE}


async def test_nothing_is_changed(well: SandboxCluster):
    flags, writes = token_of(well, ACCOUNT), writes_of(well, ACCOUNT)
    notes = settled(well)
    files = sorted(well.places.root.rglob("*"))
    await doctored(well, *flags)

    assert notes == settled(well)
    assert writes == writes_of(well, ACCOUNT)
    assert files == sorted(well.places.root.rglob("*"))
