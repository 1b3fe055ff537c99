"""The agent as its users have it: the chart by helm, the image in containerd, pods with a network.

The kubelet runs what the chart says: user, capabilities, seccomp, read-only root, probes, mounts,
the token with the node's name in it. Only the GPUs are simulated. The tests go on from each other's
release; a test that finds none installs it.

The image is that of a release that was built, or `build/image/small/hami-agent.oci.tar`. What lies
there is not built again: after a change of the agent, run deploy/image/build.
"""

import asyncio
import contextlib
import json
import re
import shlex
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from agent import __version__
from agent import cluster as annotations
from agent.cluster import GPU_DEGRADED
from agent.sandbox.hardware_talk import HardwareRequest, ask
from agent.sandbox.lab.cluster import stand_in
from tests.peers.lab.agents import RESOURCE, SOURCE
from tests.peers.lab.api import Object, notes_of
from tests.peers.lab.cluster import Cluster, kept, open_cluster, open_pod_network
from tests.peers.lab.control import ADMIN, NODE, NODE_PATH, counted
from tests.peers.lab.node import BUSYBOX_FILE, PASSWD, write_image
from tests.peers.lab.nodes import ProbePlugin, processes
from tests.peers.lab.part import Ended, run_program, status_of, until, until_answer, writable
from tests.peers.lab.placing import Programs
from tests.peers.lab.pods import PODS, a_container, key, lives, phase_of
from tests.peers.lab.running import ACCOUNT
from tests.released import released

NAMESPACE: Final = "kube-system"
IN: Final = (f"--namespace={NAMESPACE}",)
RELEASE: Final = "hami-agent"
IMAGE: Final = "localhost/hami-agent"
NEXT: Final = f"{__version__}-next"
"""The same image under a second tag: another version, as far as Kubernetes can tell."""
LIBRARY: Final = stand_in()
DAEMON_SET: Final = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{RELEASE}"
CHART: Final = released("*.tgz") or SOURCE / "deploy" / "chart" / "hami-agent"
SERVING: Final = 60.0
"""Seconds for what takes three or four on a quiet machine."""

_PLACES: Final = (*("etc", "opt", "run", "usr/local", "var/lib"), "var/lib/kubelet/device-plugins")
"""Where a look is taken at what is left."""
_OTHERS: Final = {
    *("/run/containerd", "/run/netns", "/var/lib/cni"),
    "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
}
"""What runtime, network and kubelet keep where pods have been."""
_KINDS: Final = (
    *("daemonset", "pod", "job", "configmap", "secret", "service", "serviceaccount"),
    *("role", "rolebinding", "clusterrole", "clusterrolebinding", "controllerrevision"),
    "networkpolicy",
    *("validatingadmissionpolicy", "validatingadmissionpolicybinding"),
)
_HAMI: Final = "peers.test/hami"
_HAMI_TAG: Final = "v2.10.0"
_SHELL: Final = (
    *("cat", "chmod", "cp", "find", "mktemp", "mv", "rm", "sh", "sha256sum", "stat", "sync"),
)


@dataclass(eq=False, slots=True)
class Site:
    """The cluster, its operator's commands, and all objects of the API that the chart makes."""

    cluster: Cluster
    programs: Mapping[str, Path]
    """helm and kubectl."""
    found: frozenset[str]
    """What was on the node before."""

    @property
    def agents(self) -> list[Object]:
        """The agent's pods that are to stay: an update starts the next one beside the last."""
        return [pod for pod in self.all_agents if "deletionTimestamp" not in pod["metadata"]]

    @property
    def all_agents(self) -> list[Object]:
        """The agent's pods that are there."""
        return self.pods_with("app.kubernetes.io/name", RELEASE)

    def pods_with(self, label: str, value: str) -> list[Object]:
        pods = self.cluster.pods.objects.values()
        return [pod for pod in pods if pod["metadata"].get("labels", {}).get(label) == value]

    @property
    def told(self) -> tuple[str, ...]:
        """What the agent is told: its GPUs are simulated, as in all other tests here."""
        return ("--simulate", "h100:8", *self.cluster.release.flags)

    @property
    def values(self) -> tuple[str, ...]:
        """An operator names two images, and nobody waits longer than needed."""
        return (
            f"image.repository={IMAGE}",
            f"library.image.repository={_HAMI}",
            f"extraArgs={{{','.join(self.told)}}}",
            "minReadySeconds=1",
            "config.report.nodeCondition=true",
        )

    async def attempt(self, program: str, *arguments: str) -> Ended:
        """How a program ends that the cluster's admin runs."""
        kubeconfig = str(self.cluster.plane.kubeconfig(ADMIN))
        environment = {"HOME": str(self.cluster.root), "KUBECONFIG": kubeconfig}
        return await run_program(str(self.programs[program]), *arguments, environment=environment)

    async def do(self, program: str, *arguments: str) -> str:
        """What it printed. Raises AssertionError: it failed."""
        return (await self.attempt(program, *arguments)).succeeded()

    async def helm(self, verb: str, *settings: str) -> Ended:
        """How helm ends with the release; flags may be among the settings."""
        words = [verb, RELEASE, *IN]
        if verb == "install":
            words, settings = [*words, str(CHART)], (*self.values, *settings)
        if verb == "upgrade":
            words += [str(CHART), "--reset-then-reuse-values"]
        for one in settings:
            words += [one] if one.startswith("--") else ["--set", one]
        return await self.attempt("helm", *words)

    async def rollout(self, seconds: int) -> Ended:
        """How `kubectl rollout status` ends."""
        which = (f"daemonset/{RELEASE}", *IN, f"--timeout={seconds}s")
        return await self.attempt("kubectl", "rollout", "status", *which)

    async def is_installed(self) -> bool:
        return RELEASE in (await self.do("helm", "list", *IN, "--short")).split()

    async def have_installed(self) -> None:
        """Install it where it is not, and wait until it serves. Raises as both."""
        if not await self.is_installed():
            (await self.helm("install")).succeeded()
        await self.until_serving()

    async def until_serving(self) -> None:
        """Return once kubelet and Node have the slices. Raises TimeoutError."""
        await self.cluster.until_allocatable(80, SERVING)
        await self.cluster.nodes.until(self.cluster.is_sharing, SERVING, "no slices on the Node")

    async def status(self) -> Object:
        """The status of the DaemonSet. Raises RefusedError."""
        found: Object = (await self.cluster.api.get(DAEMON_SET))["status"]
        return found

    async def objects(self) -> str:
        """The names of all objects that the chart, its hooks or helm have made."""
        kinds, label = ",".join(_KINDS), "--selector=app.kubernetes.io/part-of=hami-agent"
        made = await self.do("kubectl", "get", kinds, "--all-namespaces", "--output=name", label)
        helms = ("get", "secrets", *IN, "--output=name", "--selector=owner=helm")
        return made + await self.do("kubectl", *helms)

    async def until_gone(self) -> None:
        """Return once no such object is left: some go after helm has ended. Raises TimeoutError."""

        async def is_gone() -> bool:
            return not await self.objects()

        await until_answer(is_gone, SERVING, lambda: "some objects of the release stay")

    def left(self) -> frozenset[str]:
        """What is on the node and was not there before, but for what others keep."""
        return _entries(self.cluster) - self.found - _OTHERS

    def tail(self, lines: int = 40) -> str:
        """The last words of all containers of the release."""
        logs = self.cluster.space.view / "var" / "log" / "pods"
        files = sorted(logs.glob(f"{NAMESPACE}_{RELEASE}*/*/*.log"))
        said = [line for one in files for line in one.read_text(errors="replace").splitlines()]
        return "\n".join(said[-lines:])


@contextlib.asynccontextmanager
async def open_site(programs: Programs, tools: Path, archive: Path) -> AsyncIterator[Site]:
    """A cluster with pods' network, images and the node's label; nothing is installed yet."""
    async with open_cluster(programs) as cluster, open_pod_network(cluster):
        for file in ("libvgpu.so", "ld.so.preload"):
            (cluster.hook / file).unlink()
        library = cluster.root / "hami.tar"
        _write_hami(library)
        for one in (library, archive):
            await cluster.runtime.images("import", str(one))
        await cluster.runtime.images("tag", f"{IMAGE}:{__version__}", f"{IMAGE}:{NEXT}")
        await cluster.api.patch(NODE_PATH, {"metadata": {"labels": {"gpu": "on"}}})
        found = _entries(cluster) - {"/usr/local/vgpu"}
        both = {"helm": tools / "helm", "kubectl": programs.folder / "kubectl"}
        yield Site(cluster, both, found)


def _entries(cluster: Cluster) -> frozenset[str]:
    view = cluster.space.view
    return frozenset(
        f"/{path.relative_to(view)}" for place in _PLACES for path in (view / place).iterdir()
    )


def _write_hami(path: Path) -> None:
    """What HAMi's image has of its own for this chart: a shell, and the library."""
    files: dict[str, Path | bytes] = {
        "bin/busybox": BUSYBOX_FILE,
        "etc/passwd": PASSWD,
        "k8s-vgpu/lib/nvidia/libvgpu.so": LIBRARY,
    }
    links = {f"bin/{applet}": "busybox" for applet in _SHELL}
    write_image(path, f"{_HAMI}:{_HAMI_TAG}", files, links, ["/bin/sh"])


pytestmark = pytest.mark.timeout(300)

WRITABLE = {
    "/run/hami-agent",
    "/usr/local/vgpu",
    "/var/lib/hami-agent",
    "/var/lib/kubelet/device-plugins",
}
"""As GUIDE.md lists them."""
RUNTIMES_OWN = ("/dev", "/proc", "/sys/fs/cgroup", "/etc/hosts", "/host/sys/fs/cgroup/")
"""Every container has them; the last is what a runtime without recursive read-only mounts leaves
writable where each controller of cgroup v1 is a mount of its own."""

GAP = 5.0
"""Seconds without slices while the image changes, as GUIDE.md says."""
WRITTEN = (annotations.REGISTER, annotations.SCORE)
LEFT = {"/run/hami-agent", "/usr/local/vgpu", "/var/lib/hami-agent"}
"""As GUIDE.md says."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site_of_module(programs, tools, archive):
    async with kept(open_site(programs, tools, archive)) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def site(site_of_module):
    """The release serves; the pods of a test are gone after it."""
    site = site_of_module
    await site.have_installed()
    yield site
    names = [pod["metadata"]["name"] for pod in (await site.cluster.api.get(PODS))["items"]]
    for name in names:
        await site.cluster.remove(f"{PODS}/{name}", grace=0)
    for name in names:
        await site.cluster.until_deleted(name)


def now():
    return asyncio.get_running_loop().time()


async def rolled_out(site):
    """The update is complete, and the agent before has ended: a standby counts as ready."""
    (await site.rollout(120)).succeeded()
    await site.cluster.pods.until(
        lambda: len(site.all_agents) == 1, SERVING, "two agents are on one node"
    )


async def residents(site, prefix):
    """Two pods that run with their shares, settled; former ones had other names."""
    cluster = site.cluster
    names = await cluster.run(
        cluster.a_telling_pod(f"{prefix}-one"), cluster.a_telling_pod(f"{prefix}-two", gpus=2)
    )
    await cluster.until_settled(*names)

    def are_confirmed():
        written = cluster.rows()
        return all(written[key(name), "main"].confirmed for name in names)

    await until(are_confirmed, SERVING, site.tail)
    return names


async def held_by(cluster, names):
    """What pods have: their containers, their rows on disk, and their slices at the kubelet."""
    keys = {(key(name), "main") for name in names}
    held, written = await cluster.kubelet.held(RESOURCE), cluster.rows()
    return cluster.lives_of(names), {one: (written[one], held[one]) for one in keys}


async def test_the_chart_brings_an_agent_that_serves(site_of_module, table):
    site, cluster = site_of_module, site_of_module.cluster
    mark, began = cluster.plane.audit.mark(), now()

    (await site.helm("install")).succeeded()
    await cluster.until_allocatable(80, SERVING)
    table.add("helm install → 80 slices allocatable", now() - began)
    await site.until_serving()
    table.add("helm install → Node annotated", now() - began)
    await rolled_out(site)
    table.add("helm install → rollout complete", now() - began)

    status = await site.status()
    counts = ("desiredNumberScheduled", "updatedNumberScheduled", "numberReady", "numberAvailable")
    assert [1, 1, 1, 1] == [status.get(count) for count in counts]
    assert LIBRARY == (cluster.hook / "libvgpu.so").read_bytes()
    assert "/usr/local/vgpu/libvgpu.so\n" == (cluster.hook / "ld.so.preload").read_text()
    asked = cluster.plane.audit.since(mark, ACCOUNT)
    assert asked
    assert [] == [one for one in asked if one.code >= 400]


async def test_the_process_has_what_the_chart_says_and_pods_what_the_scheduler_gave(site, table):
    cluster, (pod,) = site.cluster, site.agents
    (pid,) = processes(lives(pod)["agent"])
    status = status_of(pid)

    assert ["0", "0", "0", "0"] == status["Uid"].split()
    assert [0] * 5 == [int(mask, 16) for name, mask in status.items() if name.startswith("Cap")]
    assert ("1", "2") == (status["NoNewPrivs"], status["Seccomp"])
    assert WRITABLE == {one for one in writable(pid) if not one.startswith(RUNTIMES_OWN)}

    began = now()
    names = await residents(site, "first")
    table.add("two pods beside the installed agent: created → settled", now() - began)
    for name in names:
        assert cluster.expected_inside(name) == await cluster.seen_inside(name)


async def test_an_agent_is_read_and_checked_in_its_pod_from_elsewhere(site):
    # The kubelet names no loopback address, and there is no other one here.
    where = {"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}]}}
    await site.cluster.api.patch(f"{NODE_PATH}/status", where)
    status = await site.cluster.verb("status", "--node", NODE, "-o", "json")
    checkup = await site.cluster.verb("doctor", "--node", NODE, "-o", "json")
    lost = await site.cluster.verb("doctor", "--node", NODE, "--only", "agent", "-o", "wide")

    assert (0, NODE) == (status.code, status.document["data"]["node"]["name"]), status
    assert status.document["source"].startswith(f"agent of {NODE} in its pod, through the ")
    assert checkup.code in {0, 1, 5}, checkup
    found = {one["id"]: one["verdict"] for one in checkup.document["data"]["findings"]}
    assert ("ok", "ok", "ok") == tuple(found[one] for one in ("P-AGENT", "P-KUBELET", "P-NODE"))
    assert "P-AGENT" in lost.text


async def test_an_update_and_its_rollback_disturb_no_pod(site, table):
    cluster = site.cluster
    names = await residents(site, "steady")
    before = await held_by(cluster, names)

    for what, step, tag in (
        ("rolling update", ("upgrade", f"image.tag={NEXT}"), NEXT),
        ("rollback", ("rollback",), __version__),
    ):
        async with cluster.watched_capacity() as gaps:
            began = now()
            (await site.helm(*step)).succeeded()
            await rolled_out(site)
            table.add(f"{what} of the image, one node → rollout complete", now() - began)
            await site.until_serving()
        assert len(gaps) <= 1
        table.hold(f"{what} of the image: no slices for", max(gaps, default=0.0), GAP)

        (pod,) = site.agents
        assert f":{tag}" in pod["spec"]["containers"][0]["image"]
        assert before == await held_by(cluster, names)
        newcomer = f"after-{what.replace(' ', '-')}"
        await cluster.run(cluster.a_telling_pod(newcomer))
        assert cluster.expected_inside(newcomer) == await cluster.seen_inside(newcomer)


async def test_a_release_that_cannot_start_is_never_complete_and_a_rollback_heals(site, table):
    cluster = site.cluster
    names = await residents(site, "through")
    before = await held_by(cluster, names)

    refused = "extraArgs={--simulate,h100:8,--split-count=9000}"
    # It ends at once, so it is never ready, and the agent before it serves on.
    await site.helm("upgrade", refused, "--wait", "--timeout=20s")
    await cluster.pods.until(
        lambda: "CrashLoopBackOff" in waiting_for(site), SERVING, "the agent does not end"
    )
    ended = await site.rollout(1)
    assert 0 != ended.code, ended.words
    status = await site.status()
    assert (0, 1) == (status.get("updatedNumberScheduled", 0), status["numberReady"])
    assert 80 == len(await cluster.kubelet.allocatable(RESOURCE))
    assert before == await held_by(cluster, names)

    began = now()
    (await site.helm("rollback")).succeeded()
    await site.until_serving()
    table.add("rollback of a release that does not start → slices", now() - began)
    await rolled_out(site)
    assert before == await held_by(cluster, names)


def waiting_for(site):
    """Why the agents' containers do not run."""
    states = (
        one["state"] for pod in site.agents for one in pod["status"].get("containerStatuses", ())
    )
    return {state["waiting"]["reason"] for state in states if "waiting" in state}


def condition(cluster):
    """The status of GpuDegraded on the Node; None: it has none."""
    conditions = cluster.nodes.objects[NODE]["status"].get("conditions") or ()
    return next((one["status"] for one in conditions if one["type"] == GPU_DEGRADED), None)


async def test_what_is_uninstalled_leaves_what_the_documents_say_and_nothing_else(
    site_of_module, table
):
    site, cluster = site_of_module, site_of_module.cluster
    await site.have_installed()
    names = await residents(site, "last")
    before, mark = cluster.lives_of(names), cluster.plane.audit.mark()
    fallen = HardwareRequest("xid", "0", 79)
    await ask(cluster.space.view / "run/hami-agent/simulate.sock", fallen)
    await cluster.nodes.until(lambda: condition(cluster) == "True", SERVING, "no condition")

    async def is_logged():
        return "patch nodes/status" in counted(cluster.plane.audit.since(mark, ACCOUNT))

    await until_answer(is_logged, SERVING, site.tail)
    asked = cluster.plane.audit.since(mark, ACCOUNT)
    assert [] == [one for one in asked if one.code >= 400]
    began = now()

    (await site.helm("uninstall")).succeeded()

    table.add("helm uninstall, its Job included", now() - began)
    assert before == cluster.lives_of(names)
    await site.until_gone()
    await cluster.nodes.until(lambda: condition(cluster) is None, SERVING, "the condition stays")
    notes = notes_of(await cluster.api.get(NODE_PATH))
    assert [] == [one for one in notes if one in WRITTEN or one.startswith("hami-agent/")]
    # The scheduler writes its question without being told of any GPU.
    assert not notes.get(annotations.HANDSHAKE, "").startswith("Reported")
    assert LEFT == site.left()


# The switch from HAMi's device plugin: a DaemonSet with HAMi's labels whose pods do nothing, and a
# plugin of the test's own that has registered the resource at the kubelet.

COMPONENT, PLUGIN = "app.kubernetes.io/component", "hami-device-plugin"


@pytest_asyncio.fixture(loop_scope="session")
async def bare_site(site_of_module):
    """Nothing is installed, and no agent was here before: one remembers a GPU that it lost."""
    if await site_of_module.is_installed():
        (await site_of_module.helm("uninstall")).succeeded()
    site_of_module.cluster.forget_agent_state()
    return site_of_module


def hamis_plugin():
    spec = {
        "nodeSelector": {"gpu": "on"},
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "hostNetwork": True,
        "containers": [a_container(gpus=0)],
    }
    labels = {COMPONENT: PLUGIN, "hami.io/webhook": "ignore"}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": PLUGIN},
        "spec": {
            "selector": {"matchLabels": {COMPONENT: PLUGIN}},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


async def until_other(site, *wanted):
    """Return once the pods of HAMi's plugin have these phases."""

    def phases():
        return [phase_of(pod) for pod in site.pods_with(COMPONENT, PLUGIN)]

    await site.cluster.pods.until(lambda: [*wanted] == phases(), SERVING, f"not {wanted}")


def write_hami_chart(folder):
    """A chart in the place of HAMi's. Raises OSError."""
    (folder / "templates").mkdir(parents=True)
    chart = {"apiVersion": "v2", "name": "hami", "version": "2.10.0"}
    (folder / "Chart.yaml").write_text(json.dumps(chart))
    (folder / "values.yaml").write_text(json.dumps({"devicePlugin": {"enabled": True}}))
    manifest = json.dumps(hamis_plugin(), indent=1)
    text = f"{{{{- if .Values.devicePlugin.enabled }}}}\n{manifest}\n{{{{- end }}}}\n"
    (folder / "templates" / "daemonset.yaml").write_text(text)


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
        rest += [word for one in site.values[1:] for word in ("--set", one)]
    if "rollout" in rest:
        rest.append(f"--timeout={SERVING:.0f}s")
    if "exec" not in rest:
        await site.do(program, *rest)


def args_of(site):
    return [pod["spec"]["containers"][0]["args"] for pod in site.agents]


async def test_the_commands_of_the_document_switch_from_hamis_plugin_to_the_agent(
    bare_site, tmp_path
):
    site, cluster, hami = bare_site, bare_site.cluster, tmp_path / "hami"
    (cluster.hook / "libvgpu.so").unlink(missing_ok=True)
    nvidia = {"metadata": {"name": "nvidia"}, "handler": "runc"}
    await cluster.api.create("/apis/node.k8s.io/v1/runtimeclasses", nvidia)
    write_hami_chart(hami)
    await site.do("helm", "install", "hami", str(hami), *IN)
    await until_other(site, "Running")
    refused = (await site.helm("install")).errors
    assert f"HAMi's device plugin (DaemonSet {PLUGIN}) serves the same nodes" in refused
    looks, (serve, *wait, off, alone) = typed_in_the_document()

    plugins = cluster.kubelet.plugins
    async with ProbePlugin(plugins, resource=RESOURCE, name="nvidia", count=10) as other:
        await other.register()
        await cluster.until_allocatable(10)
        for words in looks:
            await type_out(site, hami, words)
        assert [["run", "--observe", *site.told]] == args_of(site)
        assert 10 == len(await cluster.kubelet.allocatable(RESOURCE))
        assert annotations.REGISTER not in notes_of(await cluster.api.get(NODE_PATH))
        assert not (cluster.hook / "libvgpu.so").exists()

        for words in (serve, *wait):
            await type_out(site, hami, words)
        await site.until_serving()
        await until_other(site, "Running")
    for words in (off, alone, *wait):
        await type_out(site, hami, words)

    await until_other(site)
    await site.until_serving()
    assert [["run", *site.told]] == args_of(site)
    (pod,) = site.agents
    assert "HAMI_AGENT_TAKEOVER" not in {one["name"] for one in pod["spec"]["containers"][0]["env"]}
    assert (cluster.hook / "libvgpu.so").exists()
    await cluster.run(cluster.a_telling_pod("switched"))
    await cluster.until_settled("switched")
