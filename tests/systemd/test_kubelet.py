"""A kubelet that is away for long, or that comes back to an empty directory."""

import asyncio
import shutil

import pytest
import pytest_asyncio

from tests.systemd.lab.bare_metal import KUBELET

USER = "4711"
"""Not nobody: whoever is not of the service's user namespace looks like him."""


async def test_a_kubelet_may_be_absent_for_longer_than_any_watchdog_waits(node):
    await node.drop_in("WatchdogSec=5s", "TimeoutStartSec=20s")
    await node.cluster.kubelet.kill()
    (node.cluster.places.plugins / "kubelet.sock").unlink()
    await node.systemctl("start")
    before = await node.until_shown(
        ActiveState="active", StatusText="waiting for the kubelet: its socket is not there"
    )

    await asyncio.sleep(7)
    await node.cluster.kubelet.start()

    await node.offers(80)
    after = await node.until_shown(ActiveState="active", NRestarts="0")
    assert before["MainPID"] == after["MainPID"]


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_kubelets_directory_is_made_where_there_is_none_and_one_made_anew_is_written_to(
    node, is_first
):
    # `kubeadm reset` empties /var/lib/kubelet, and the next kubelet makes all anew. And whoever
    # installs the agent first: systemd could not make writable what is not there.
    if not is_first:
        await node.systemctl("start")
        await node.offers(80)
    await node.cluster.kubelet.kill()
    shutil.rmtree(node.cluster.places.plugins)
    if is_first:
        await node.systemctl("start")
        said = await node.machine.run("stat", "--format=%a %U", f"{KUBELET}/device-plugins")
        assert "755 root" == said.strip()
    else:
        shutil.rmtree(node.cluster.places.pod_resources)

    await node.cluster.kubelet.start()

    await node.offers(80)


@pytest_asyncio.fixture(loop_scope="session")
async def given(node):
    """The node with the kubelet's directory in the hands of another user than root."""
    passwd = node.machine.path("/etc/passwd")
    known = passwd.read_text()
    passwd.write_text(f"{known}giver:x:{USER}:65534::/:/bin/sh\n")
    await node.machine.run("chown", "-R", USER, KUBELET)
    await node.machine.run("chmod", "700", f"{KUBELET}/device-plugins")
    yield node
    await node.clear()
    await node.machine.run("chown", "-R", "root", KUBELET)
    await node.machine.run("chmod", "750", f"{KUBELET}/device-plugins")
    passwd.write_text(known)


async def test_a_kubelets_directory_that_was_given_to_another_user_stays_his_and_he_serves(given):
    await given.drop_in(f"User={USER}")

    said = await given.machine.try_run("systemctl", "start", "hami-agent")

    assert 0 == said.code, await given.last_words()
    await given.offers(80)
    shown = await given.machine.run("stat", "--format=%a %u", f"{KUBELET}/device-plugins")
    assert f"700 {USER}" == shown.strip()
