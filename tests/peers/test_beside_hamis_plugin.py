"""The chart beside HAMi's device plugin: one of both on a node, or both for the time of a switch.

HAMi's plugin is a DaemonSet with HAMi's labels whose pods do nothing, and a plugin of the test's
own that has registered the resource at the kubelet.
"""

import asyncio

import pytest
import pytest_asyncio

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.keeper import kept
from tests.peers.lab.node_state import until_allocatable
from tests.peers.lab.pods import a_telling_pod, phase_of, run, until_settled
from tests.peers.lab.probe import ProbePlugin
from tests.peers.lab.site import CHART, NAMESPACE, RELEASE, SERVING, VALUES, open_site
from tests.peers.lab.workloads import a_container

pytestmark = pytest.mark.timeout(300)

LABEL = {"app.kubernetes.io/component": "hami-device-plugin"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(programs, tools, archive):
    async with kept(open_site(programs, tools, archive)) as made:
        yield made


def daemon_sets(namespace):
    return f"/apis/apps/v1/namespaces/{namespace}/daemonsets"


def hamis_plugin():
    spec = {
        "nodeSelector": {"gpu": "on"},
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "hostNetwork": True,
        "containers": [a_container(gpus=0)],
    }
    labels = {**LABEL, "hami.io/webhook": "ignore"}
    return {
        "metadata": {"name": "hami-device-plugin"},
        "spec": {
            "selector": {"matchLabels": LABEL},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def others(cluster: Cluster):
    """The pods of HAMi's plugin."""
    pods = cluster.pods.objects.values()
    return [pod for pod in pods if LABEL.items() <= pod["metadata"].get("labels", {}).items()]


def phases(pods):
    return [phase_of(pod) for pod in pods]


async def until_phases(cluster, pods, *wanted):
    await cluster.pods.until(
        lambda: [*wanted] == phases(pods()), SERVING, f"not {wanted}: {phases(pods())}"
    )


async def remove_other(cluster, namespace):
    await cluster.api.delete(f"{daemon_sets(namespace)}/hami-device-plugin")
    await until_phases(cluster, lambda: others(cluster))


async def test_of_both_plugins_the_first_keeps_the_node(site):
    cluster = site.cluster
    await cluster.api.create(daemon_sets("default"), hamis_plugin())
    await until_phases(cluster, lambda: others(cluster), "Running")

    await site.install()
    await cluster.pods.until(lambda: told(site.agents), SERVING, "nobody says why the agent waits")
    assert ["Pending"] == phases(site.agents)
    assert "anti-affinity" in told(site.agents)
    assert frozenset() == await cluster.kubelet.allocatable(RESOURCE)

    await remove_other(cluster, "default")
    await look_again(site, NAMESPACE, "app.kubernetes.io/name=hami-agent")
    await site.until_serving()
    await cluster.api.create(daemon_sets("default"), hamis_plugin())
    await cluster.pods.until(lambda: told(others(cluster)), SERVING, "nobody says why it waits")
    assert ["Pending"] == phases(others(cluster))
    assert ["Running"] == phases(site.agents)

    await site.uninstall()
    await look_again(site, "default", "app.kubernetes.io/component=hami-device-plugin")
    await until_phases(cluster, lambda: others(cluster), "Running")
    await remove_other(cluster, "default")


async def look_again(site, namespace, label):
    """As deploy/README.md says: the scheduler leaves a pod that waits alone for up to 5 minutes.

    It looks again when a pod is gone that all terms of the anti-affinity match, and each of ours
    matches another plugin.
    """
    where = (f"--namespace={namespace}", f"--selector={label}")
    await site.run.kubectl("delete", "pods", *where, "--field-selector=status.phase=Pending")


def told(pods):
    """Why the scheduler has no node for them."""
    conditions = (one for pod in pods for one in pod["status"].get("conditions", ()))
    return "; ".join(one.get("message", "") for one in conditions if one["status"] == "False")


async def test_a_switch_is_refused_until_it_is_asked_for_and_then_the_node_is_the_agents(
    site, table
):
    cluster = site.cluster
    await cluster.api.create(daemon_sets(NAMESPACE), hamis_plugin())
    await until_phases(cluster, lambda: others(cluster), "Running")
    given = (word for one in VALUES for word in ("--set", one))
    where = (f"--namespace={NAMESPACE}", *given)
    refused = await site.run.try_helm("install", RELEASE, str(CHART), *where)
    assert 0 != refused.code
    assert "HAMi's device plugin (DaemonSet hami-device-plugin) serves the same nodes" in (
        refused.words
    )

    loop = asyncio.get_running_loop()
    plugins = cluster.kubelet.plugins
    async with ProbePlugin(plugins, resource=RESOURCE, name="nvidia", count=10) as other:
        await other.register()
        await until_allocatable(cluster, 10)
        began = loop.time()
        await site.install("takeover=true")
        await site.until_serving()
        table.add("helm install with takeover=true → the agent's slices", loop.time() - began)
        assert ["Running"] == phases(others(cluster))
    await remove_other(cluster, NAMESPACE)

    await site.upgrade("takeover=false")
    ended = await site.rollout(120)
    assert 0 == ended.code, ended.words
    await site.until_serving()
    await run(cluster, a_telling_pod(cluster, "after"))
    await until_settled(cluster, "after")
