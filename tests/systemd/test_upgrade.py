"""The released version before this one is upgraded and comes back, as GUIDE.md says."""

import os
import shutil

import pytest

from agent import __version__
from agent.sandbox.scenario.facts import is_running
from agent.sandbox.scenario.stage import Wish, Workload
from agent.state import CURRENT, decode_state
from tests.peers.lab.part import until
from tests.systemd.lab.bare_metal import PATIENCE
from tests.systemd.lab.made import name

FORMER = "0.1.0"
NEW = f"/src/dist/{name(__version__)}"
XID = "57"
"""The GPU is bad for ten minutes, of which its driver knows nothing."""
STATE = f"/var/lib/hami-agent/{CURRENT}"


@pytest.fixture(scope="session")
def former(machine_of_session, folder):
    """How the former version was installed, with its own script and dependencies."""
    made = os.environ["HAMI_SYSTEMD_FORMER"]  # noqa: TID251 -- said by tests/systemd/run
    if not made:
        pytest.skip(f"this clone has no version {FORMER}: git fetch --unshallow")
    shutil.copytree(made, folder / "dist" / FORMER)
    place = f"/src/dist/{FORMER}"
    locked = ("--lock", f"{place}/wheels/lock.txt", "--wheels", f"{place}/wheels")
    return (f"{place}/systemd/install", *locked, f"{place}/{name(FORMER)}")


def written(node):
    """The rows on disk, by pod, and the GPUs that are not ok."""
    state = decode_state(node.machine.path(STATE).read_bytes())
    rows = {(row.holder.pod, row.key.container): row for row in state.ledger.rows if row.holder}
    return rows, {uuid for uuid, health in state.health.items() if health.condition != "ok"}


async def serves(node, version, pod):
    """That version runs, offers all slices but the ill GPU's, and serves a new pod: all on disk."""
    await node.offers(70)
    assert f"hami-agent {version}" in await node.machine.run("/usr/local/bin/hami-agent", "version")
    cluster = node.cluster
    cluster.submit(Workload(pod, "", (Wish("main", 1, 1024), Wish("side", 2, 512))).pod())
    assert await cluster.until(lambda: is_running(cluster, pod), PATIENCE), cluster.pod(pod)

    def are_written():
        rows, _ = written(node)
        return all(key in rows and rows[key].confirmed for key in ((pod, "main"), (pod, "side")))

    await until(are_written, PATIENCE, lambda: f"not confirmed: {written(node)}")
    return written(node)


@pytest.mark.timeout(900)
async def test_0_1_is_upgraded_and_comes_back_and_no_pod_and_no_gpu_is_forgotten(bare, former):
    # Each version simulates GPUs of its own: how they are talked to is no promise.
    bare.settings(HAMI_AGENT_DRIVER_SIMULATE="h100:8")
    await bare.machine.run(*former, within=240)
    await bare.offers(80)
    await bare.machine.run("/usr/local/bin/hami-agent", "simulate", "xid", "--gpu=0", XID)
    known = await serves(bare, FORMER, "first")
    running = await bare.shown()

    config = bare.write("/etc/hami-agent/config.yaml", "report: {profile: colon-7}\n")
    said = await bare.install(NEW)
    assert (1, True) == (said.code, "expected one of json, colon, found `colon-7`" in said.err), (
        said
    )
    assert running["MainPID"] == (await bare.shown())["MainPID"]
    config.unlink()

    there, back, forth = (NEW, __version__), ("--rollback", FORMER), ("--rollback", __version__)
    for number, (step, version) in enumerate((there, back, forth)):
        said = await bare.install(step)
        assert 0 == said.code, said
        assert known == written(bare)
        known = await serves(bare, version, f"later-{number}")

    rows, ill = known
    assert (8, 1) == (len(rows), len(ill))
    assert [] == await bare.journal("state.recovered")
