"""What the documents tell people to type with kubectl, as it stands there, at a real API server.

There is no kubelet: what waits for a container is not typed here.
"""

import os
import re
import shlex

import pytest
import pytest_asyncio

from agent import cluster as annotations
from tests.peers.lab.agents import SOURCE
from tests.peers.lab.api import STRATEGIC, notes_of
from tests.peers.lab.cluster import kept
from tests.peers.lab.control import ADMIN, NODE, NODE_PATH
from tests.peers.lab.part import run_program, until_answer
from tests.peers.lab.servers import conditions, marks, real_server
from tests.shape.typed import runs_of, told

SYSTEM = "/api/v1/namespaces/kube-system"
APPS = "/apis/apps/v1/namespaces/kube-system/daemonsets"
DOCTOR = f"{SYSTEM}/pods/hami-agent-doctor"
PATIENCE = 60.0
OWN = ("hami",)
"""`kubectl hami` is this program itself, by kubectl's way with plugins."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(binaries):
    async with kept(real_server(binaries)) as made:
        yield made


@pytest.fixture
def typed(server, binaries, tmp_path):
    """Types a line of a document in the repository's root, and returns what it says."""
    kubeconfig, path = str(server.plane.kubeconfig(ADMIN)), f"{binaries}:{os.defpath}"
    environ = {"PATH": path, "HOME": str(tmp_path), "KUBECONFIG": kubeconfig}

    async def type_line(line):
        shell = ("/bin/bash", "-euo", "pipefail", "-c", line)
        ended = await run_program(*shell, environment=environ, within=PATIENCE, folder=SOURCE)
        return ended.succeeded()

    return type_line


def line(document, *words):
    """The one line with all these words."""
    (found,) = [one for one in told(document) if all(word in one for word in words)]
    return found


async def names(server, path):
    return {one["metadata"]["name"] for one in (await server.admin.get(path))["items"]}


async def test_kubectl_has_the_commands_and_their_flags(typed):
    for words in runs_of("kubectl"):
        if words != OWN:
            said = await typed(shlex.join(("kubectl", *words, "--help")))
            (usage,) = re.findall(r"^Usage:\n  kubectl ([\w-]+)", said, re.MULTILINE)
            assert usage in words


async def test_the_manifests_are_applied_started_anew_and_deleted(server, typed):
    generations = []
    for words in ("kubectl apply -f deploy/manifests", "rollout restart"):
        await typed(line("GUIDE.md", words))
        found = await server.admin.get(f"{APPS}/hami-agent")
        generations.append(found["metadata"]["generation"])
    assert generations[0] + 1 == generations[1]
    assert "hami-agent" in await names(server, f"{SYSTEM}/serviceaccounts")

    await typed(line("GUIDE.md", "kubectl delete -f deploy/manifests"))
    assert "hami-agent" not in await names(server, APPS)


async def test_the_doctor_is_sent_to_a_node_and_leaves_nothing(server, typed):
    said = await typed(line("GUIDE.md", "deploy/doctor.yaml", "kubectl apply"))

    assert 4 == said.count("created")
    spec = (await server.admin.get(DOCTOR))["spec"]
    (container,) = spec["containers"]
    image = "registry.example:5000/gpu/hami-agent:0.2.0"
    assert ("gpu-1", image) == (spec["nodeName"], container["image"])

    # Nobody is there to confirm that the container ended.
    await typed(f"{line('GUIDE.md', 'delete -f deploy/doctor.yaml')} --wait=false")
    await server.admin.ask("DELETE", DOCTOR, {"gracePeriodSeconds": 0})

    async def is_gone():
        return "hami-agent-doctor" not in await names(server, f"{SYSTEM}/pods")

    await until_answer(is_gone, PATIENCE, lambda: "the doctor's pod is still there")
    assert "hami-agent-doctor" not in await names(server, f"{SYSTEM}/serviceaccounts")


@pytest.mark.parametrize("document", ["RUNBOOK.md", "GUIDE.md"])
async def test_what_stays_on_a_node_is_taken_off_it(server, typed, document):
    written = dict.fromkeys((annotations.REGISTER, annotations.SCORE, annotations.HANDSHAKE), "x")
    await server.admin.patch(NODE_PATH, marks(**written, kept="1"))
    both = conditions(("GpuDegraded", "True"), ("Ready", "True"))
    await server.admin.patch(f"{NODE_PATH}/status", both, STRATEGIC)

    text = (SOURCE / document).read_text().replace("\n", " ")
    (remove,) = re.findall(r"(kubectl patch node (?:NODE|NAME) [^`]+)`", text)
    await typed(re.sub("NODE|NAME", NODE, remove, count=1))
    node = await server.admin.get(NODE_PATH)
    assert ["Ready"] == [one["type"] for one in node["status"]["conditions"]]

    if document != "RUNBOOK.md":
        await typed(line(document, "kubectl annotate node NAME").replace("NAME", NODE))
        held = notes_of(await server.admin.get(NODE_PATH))
        assert "1" == held["kept"]
        assert not written.keys() & held.keys()
