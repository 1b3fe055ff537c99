"""Static pods, which the kubelet admits before anybody else hears of them: the real kubelet only.

The model has no static pods: all that it hosts comes from its store.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from tests.peers.lab.identities import NODE
from tests.peers.lab.pods import NAMESPACE, a_pod, stray

REFUSAL = GRPCError(Status.FAILED_PRECONDITION, "test refusal. [HA-3f9c]")


class StaticPods:
    """A directory of the kubelet's for static pods."""

    def __init__(self, node, directory: Path) -> None:
        self.node = node
        self.directory = directory

    def write(self, name: str) -> None:
        pod = stray(a_pod(self.node.known_as(name), self.node.container()))
        whole = self.directory / f".{name}"
        whole.write_text(json.dumps(pod))
        whole.rename(self.directory / f"{name}.json")

    def remove(self, name: str) -> None:
        (self.directory / f"{name}.json").unlink()

    def mirror(self, name: str) -> str:
        return f"{self.node.known_as(name)}-{NODE}"

    def is_known(self, name: str) -> bool:
        return f"{NAMESPACE}/{self.mirror(name)}" in self.node.cluster.pods.objects

    async def held(self, name: str) -> dict[str, int] | None:
        found = await self.node.resources.find(NAMESPACE, self.mirror(name))
        return None if found is None else {c.name: len(c.devices) for c in found.containers}


@pytest_asyncio.fixture(loop_scope="session")
async def static_pods(node) -> AsyncIterator[StaticPods]:
    kubelet, runtime = node.cluster.kubelet, node.cluster.runtime
    directory = node.cluster.root / "static"
    directory.mkdir(exist_ok=True)
    kubelet.configure(runtime.socket, staticPodPath=str(directory), fileCheckFrequency="1s")
    await node.restart()
    yield StaticPods(node, directory)
    await node.kill()
    kubelet.configure(runtime.socket)
    await node.start()


@pytest.mark.parametrize("place", ["real"], indirect=True)
async def test_a_static_pod_is_asked_for_before_the_api_knows_it(node, static_pods):
    async with node.plugin() as plugin:
        plugin.script.refusals.append(REFUSAL)
        static_pods.write("refused")
        await node.until(lambda: plugin.asked, "no Allocate")
        # In a kubelet's first seconds a refused one has a mirror pod all the same.
        await node.stays(lambda: len(plugin.asked) == 1, "the refused one is asked for again", 3.0)
        static_pods.remove("refused")

        plugin.hold()
        static_pods.write("p")
        await node.until(lambda: len(plugin.asked) == 2, "no Allocate, or the refused one again")
        assert not static_pods.is_known("p")
        assert {"main": 0} == await static_pods.held("p")
        plugin.let_go()
        await node.until(lambda: static_pods.is_known("p"), "no mirror pod")
        assert {"main": 1} == await static_pods.held("p")
        static_pods.remove("p")
        await node.until(lambda: not static_pods.is_known("p"), "the mirror pod stays")
