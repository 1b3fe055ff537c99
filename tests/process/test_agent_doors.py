"""The kubelet's directory as an operator may have left it."""

import pytest

from agent.sandbox.lab.cluster import RESOURCE, open_cluster
from agent.sandbox.lab.web import fetch
from tests.process.agent_process import PATIENCE, options

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(60)]


async def test_in_a_directory_that_everybody_may_write_nothing_is_served_until_it_is_mended():
    async with open_cluster(options()) as cluster:
        plugins = cluster.places.plugins
        plugins.chmod(0o1777)
        await cluster.start_agent()

        assert await cluster.until(
            lambda: bool(cluster.log.of("registration.not_serving")), PATIENCE
        ), cluster.log.last(20)
        (line, *_) = cluster.log.of("registration.not_serving")
        assert f"{plugins} is writable by everybody" in str(line.fields["text"])
        assert {"kubelet.sock"} == {path.name for path in plugins.glob("*.sock")}
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        page = await fetch(cluster.web_address or "", "/readyz?verbose")
        assert (503, True) == (page.status, "writable by everybody" in page.text)

        plugins.chmod(0o750)
        assert await cluster.until(lambda: cluster.kubelet.capacity(RESOURCE) == 80, PATIENCE), (
            cluster.log.last(20)
        )
