from pathlib import Path
import pytest, pytest_asyncio
from agent import __version__
from tests.peers.lab.cluster import kept
from tests.peers.lab.pods import a_telling_pod, run
from tests.peers.lab.grants import expected_inside, seen_inside
from tests.peers.lab.node_state import capacity_of
from tests.peers.lab.site import open_site, values, _given
from tests.peers.test_installed import residents, rolled_out, held_by, now

pytestmark = pytest.mark.timeout(900)
OLD = Path("/tmp/h1/oldrepo")

@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site_of_module(programs, tools, archive):
    async with kept(open_site(programs, tools, archive)) as made:
        yield made

async def test_trial(site_of_module):
    site = site_of_module; cluster = site.cluster
    await cluster.runtime.load(OLD / "build/image/small/hami-agent.oci.tar")
    given = values(cluster.release)
    ended = await site.run.try_helm("install", "hami-agent", str(OLD / "deploy/chart/hami-agent"), "--namespace=kube-system", *_given(given))
    assert 0 == ended.code, ended.words
    await site.until_serving()
    await rolled_out(site)
    assert ":0.1.0" in site.agents[0]["spec"]["containers"][0]["image"]
    names = await residents(site, "steady")
    before = await held_by(cluster, names)
    for what, step, tag in (("upgrade", site.upgrade, __version__), ("rollback", site.rollback, "0.1.0"), ("upgrade2", site.upgrade, __version__)):
        async with capacity_of(cluster) as capacity:
            await step()
            await rolled_out(site)
            await site.until_serving()
        print(what, "gaps", capacity.gaps())
        (pod,) = site.agents
        assert f":{tag}" in pod["spec"]["containers"][0]["image"]
        after = await held_by(cluster, names)
        assert before == after, (before, after)
        newcomer = f"after-{what}"
        await run(cluster, a_telling_pod(cluster, newcomer))
        assert expected_inside(cluster, newcomer) == await seen_inside(cluster, newcomer)
        print(what, "ok", now())
