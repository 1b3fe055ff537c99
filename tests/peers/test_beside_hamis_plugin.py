"""The chart beside HAMi's device plugin: one of both on a node, or both for the time of a switch.

HAMi's plugin is a DaemonSet with HAMi's labels whose pods do nothing, and a plugin of the test's
own that has registered the resource at the kubelet.
"""

import asyncio
import re
import shlex

import pytest
import pytest_asyncio

from agent import cluster as annotations
from tests.peers.lab.agents import RESOURCE, SOURCE
from tests.peers.lab.cluster import Cluster, kept
from tests.peers.lab.node_state import NODE_PATH, notes_of, until_allocatable
from tests.peers.lab.nodes import ProbePlugin
from tests.peers.lab.pods import a_container, a_telling_pod, phase_of, run, until_settled
from tests.peers.lab.site import CHART, NAMESPACE, RELEASE, SERVING, extra_args, open_site, values
from tests.peers.lab.switch import write_hami_chart

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
    """As GUIDE.md says: the scheduler leaves a pod that waits alone for up to 5 minutes.

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
    given = (word for one in values(cluster.release) for word in ("--set", one))
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


SECTION = re.compile(r"^## Switch from HAMi's device plugin\n(.*?)^## ", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def typed_in_the_document():
    """The commands of a switch, as words: those that look, and those that switch."""
    (section,) = SECTION.findall((SOURCE / "GUIDE.md").read_text())
    looks, switches, _ = BLOCK.findall(section)
    blocks = (block.replace("\\\n", " ").splitlines() for block in (looks, switches))
    return [[shlex.split(line) for line in lines] for lines in blocks]


async def type_out(site, hami, words):
    """One of them, with the names of here; the lab's API server cannot start one in a container."""
    here = {
        "image.registry=registry.example:5000": "image.registry=localhost",
        "image.repository=gpu/hami-agent": "image.repository=hami-agent",
        "deploy/chart/hami-agent": str(CHART),
        "hami-charts/hami": str(hami),
    }
    program, *rest = (here.get(word, word) for word in words)
    if rest[0] == "install":
        given = values(site.cluster.release)[1:]
        rest += [word for one in given for word in ("--set", one)]
    if "rollout" in rest:
        rest.append(f"--timeout={SERVING:.0f}s")
    if "exec" not in rest:
        await {"helm": site.run.helm, "kubectl": site.run.kubectl}[program](*rest)


async def hami_alone(site, chart):
    """Install the stand-in for HAMi's chart on a node that never had the agent."""
    if await site.is_installed():
        await site.uninstall()
    (site.cluster.hook / "libvgpu.so").unlink(missing_ok=True)
    nvidia = {"metadata": {"name": "nvidia"}, "handler": "runc"}
    await site.cluster.api.create("/apis/node.k8s.io/v1/runtimeclasses", nvidia)
    write_hami_chart(chart, hamis_plugin())
    await site.run.helm("install", "hami", str(chart), f"--namespace={NAMESPACE}")
    await until_phases(site.cluster, lambda: others(site.cluster), "Running")
    return chart


def args_of(site):
    pods = site.agents
    return [pod["spec"]["containers"][0]["args"] for pod in pods]


async def test_the_commands_of_the_document_switch_from_hamis_plugin_to_the_agent(site, tmp_path):
    cluster = site.cluster
    hami = await hami_alone(site, tmp_path / "hami")
    told = extra_args(cluster.release)
    looks, (serve, *wait, off, alone) = typed_in_the_document()

    plugins = cluster.kubelet.plugins
    async with ProbePlugin(plugins, resource=RESOURCE, name="nvidia", count=10) as other:
        await other.register()
        await until_allocatable(cluster, 10)
        for words in looks:
            await type_out(site, hami, words)
        assert [["run", "--observe", *told]] == args_of(site)
        assert 10 == len(await cluster.kubelet.allocatable(RESOURCE))
        assert annotations.REGISTER not in notes_of(await cluster.api.get(NODE_PATH))
        assert not (cluster.hook / "libvgpu.so").exists()

        for words in (serve, *wait):
            await type_out(site, hami, words)
        await site.until_serving()
        assert ["Running"] == phases(others(cluster))
    for words in (off, alone, *wait):
        await type_out(site, hami, words)

    await until_phases(cluster, lambda: others(cluster))
    await site.until_serving()
    assert [["run", *told]] == args_of(site)
    (pod,) = site.agents
    assert "HAMI_AGENT_TAKEOVER" not in {one["name"] for one in pod["spec"]["containers"][0]["env"]}
    assert (cluster.hook / "libvgpu.so").exists()
    await run(cluster, a_telling_pod(cluster, "switched"))
    await until_settled(cluster, "switched")
