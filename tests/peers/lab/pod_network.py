"""A network for the pods of a cluster, and its first Service, `kubernetes`, on it.

Each pod gets an address of its own and a way to the node, no further. There is no kube-proxy: the
gateway of the pods has the Service's address, and a relay behind it.
"""

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Final

from tests.peers.lab.agents import SOURCE
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.part import Part
from tests.peers.lab.waiting import until

_FIRST: Final = "00-pods.conflist"
"""Before the runtime's own: it takes the first by name."""
_FORWARDING: Final = "/proc/sys/net/ipv4/ip_forward"


@contextlib.asynccontextmanager
async def open_pod_network(cluster: Cluster) -> AsyncIterator[Part]:
    """Pods that are created from now on get addresses; the relay, until the block ends.

    Raises:
        RuntimeError, TimeoutError, OSError: it cannot be made.
    """
    # The plugin would have the whole machine forward packets, which nobody here needs.
    mask = cluster.root / "ip-forward"
    mask.write_text("0\n")
    await _done(cluster, ("mount", "--bind", str(mask), _FORWARDING))
    plane = cluster.plane
    command = (
        *(sys.executable, "-m", "tests.peers.lab.relay", plane.service),
        plane.server.rpartition(":")[2],
    )
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"}
    part = Part("relay", command, cluster.root / "logs", environment=environment)
    file = cluster.root / "cni" / _FIRST
    file.write_text(json.dumps(_described(plane.service)))
    await part.start()
    try:
        yield part
    finally:
        file.unlink()
        await part.kill()


def _described(gateway: str) -> object:
    network = gateway.rpartition(".")[0]
    addresses = {"subnet": f"{network}.0/24", "rangeStart": f"{network}.128", "gateway": gateway}
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [{"type": "ptp", "ipam": {"type": "host-local", "ranges": [[addresses]]}}],
    }


async def _done(cluster: Cluster, command: Sequence[str]) -> None:
    part = Part("once", cluster.space.command(command), cluster.root / "logs")
    await part.start()
    await until(lambda: not part.is_alive, 10.0, part.tail)
    if part.code:
        raise RuntimeError(part.tail())
