"""What GUIDE.md tells to type on bare metal works, as it stands there."""

import re

import pytest

from agent import __version__
from agent.cluster import REGISTER, SCORE
from tests.systemd.lab.bare_metal import ROOT
from tests.systemd.lab.made import LATER, name

TEXT = (ROOT / "GUIDE.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SUDO = r"""printf '#!/bin/sh\nexec "$@"\n' >/usr/local/bin/sudo; chmod 755 /usr/local/bin/sudo"""


async def typed(node, block):
    """Type the block's lines in a folder as the document supposes it."""
    await node.machine.run("sh", "-ec", f"cd /tmp/node\n{block}", within=240)


async def lay_out(node, version):
    """The folders `systemd` and `dist`, with the wheel of that version."""
    await node.machine.run(
        "sh",
        "-ec",
        "rm -rf /tmp/node; mkdir -p /tmp/node/dist; cd /tmp/node; ln -s /src/systemd systemd;"
        f"ln -s /src/wheels/* /src/dist/{name(version)} dist",
    )


@pytest.mark.timeout(900)
async def test_all_commands_of_the_document_in_their_order(bare):
    look, install, daily, upgrade, uninstall = BLOCKS
    await bare.machine.run("sh", "-ec", f"mkdir -p /usr/local/bin; {SUDO}")
    bare.write("/etc/hami-agent/config.yaml", "sharing: {splitCount: 10}\n")

    await lay_out(bare, __version__)
    await typed(bare, look)
    assert not bare.endpoints()
    await typed(bare, install)
    await bare.offers(80)
    await typed(bare, daily)
    await bare.offers(80)

    await lay_out(bare, LATER)
    await typed(bare, upgrade)
    await bare.offers(80)
    assert __version__ in await bare.machine.run("hami-agent", "version")

    assert REGISTER in bare.cluster.node_annotations()
    await typed(bare, uninstall)
    # This API server keeps no record of who wrote what. The scheduler may have answered just then.
    assert not {REGISTER, SCORE} & bare.cluster.node_annotations().keys()
    assert "not-found" in await bare.systemctl("show", "--property=LoadState")
