"""`explain`, beside the scheduler whose rules it repeats.

Why a pod is not placed is held to what HAMi's scheduler answered to kube-scheduler, word for word.
Then the first change that `explain` names is made, and the pod must run.
"""

import contextlib
import copy
import re

import pytest

from agent import cluster as annotations
from agent.sandbox.hardware_talk import HardwareRequest
from tests.peers.lab.api import notes_of
from tests.peers.lab.control import NODE
from tests.peers.lab.placing import WITHIN
from tests.peers.lab.pods import PODS, a_container, a_pod, key
from tests.peers.lab.running import registered_health

LOST = HardwareRequest("xid", "1", 79)
REASONS = re.compile(r"0/1 nodes are available: 1 (.+?)\.(?: |$)")
DROP = re.compile(r"drop the annotation (\S+)")
LESS = re.compile(r"ask for at most ([\d,]+) .*?\((nvidia\.com/\w+)\)")
pytestmark = pytest.mark.timeout(240)


async def explained(cluster, name):
    """What `explain` says: exit code, the gate that says no with its reason, and all the rest."""
    answer = await cluster.verb("explain", key(name), "-o", "json")
    data = answer.document["data"]
    shut = [(one["name"], one["reason"]) for one in data["gates"] if one["verdict"] == "blocked"]
    return answer.code, next(iter(shut), None), data


def reasons_of(data):
    """What keeps the pod off the Node that is told first, in HAMi's own words."""
    return set(data["nodes"][0]["reason"].split(", "))


async def until_reasons(cluster, name, *reasons):
    """Return once HAMi's scheduler has told these of the one Node, by the pod's condition.

    An Event of kube-scheduler may still have the text of an attempt before the last one.
    """

    def are_told():
        conditions = cluster.status_of(name).get("conditions") or ()
        texts = (one.get("message") or "" for one in conditions if one["type"] == "PodScheduled")
        found = REASONS.match(next(texts, ""))
        return found and {*reasons} == set(found[1].split(", "))

    await cluster.pods.until(are_told, 40.0, f"{name} is not {reasons}")


async def runs_as_advised(cluster, pod, said):
    """The first change makes the pod run, under another name; then both are removed."""
    changed = copy.deepcopy(pod)
    metadata, spec = changed["metadata"], changed["spec"]
    metadata["name"] += "-again"
    if dropped := DROP.fullmatch(said):
        del metadata["annotations"][dropped[1]]
    elif less := LESS.match(said):
        spec["containers"][0]["resources"]["limits"][less[2]] = less[1].replace(",", "")
    else:
        assert said.startswith("drop nodeSelector,")
        del spec["nodeSelector"]
    await cluster.run(changed)
    await cluster.until_settled(metadata["name"])
    for name in (pod["metadata"]["name"], metadata["name"]):
        await cluster.delete(name, grace=0)
        await cluster.until_deleted(name)
    await cluster.until_unlocked()


def noted(pod, **notes):
    return {**pod, "metadata": {**pod["metadata"], "annotations": notes}}


async def resident(cluster, *, gpus=8, memory=1000, cores=95, **notes):
    """A pod on each GPU; while it runs, HAMi's scheduler knows the Node."""
    pod = a_pod("resident", a_container(gpus=gpus, memory=memory, cores=cores))
    await cluster.run(noted(pod, **notes))
    await cluster.until_settled("resident")


SMALL = a_container(cores=5)
NO_GPU = {
    "CardTypeMismatch": noted(a_pod("typed", SMALL), **{"nvidia.com/use-gputype": "A100"}),
    "CardUuidMismatch": noted(a_pod("chosen", SMALL), **{"nvidia.com/use-gpuuuid": "GPU-none"}),
    "ExclusiveDeviceAllocateConflict": noted(
        a_pod("alone", SMALL), **{"hami.io/gpu-scheduler-policy": "mutex"}
    ),
    "CardInsufficientMemory": a_pod("whole", a_container(memory=None, cores=5)),
    "CardInsufficientCore": a_pod("busy", a_container(cores=10)),
    "NodeInsufficientDevice": a_pod("many", a_container(gpus=9, cores=5)),
}
ELSEWHERE = a_pod("elsewhere", SMALL, nodeSelector={"zone": "b"})


async def test_what_no_gpu_has_is_named_as_the_scheduler_does_and_the_first_change_places_the_pod(
    cluster, agent
):
    await resident(cluster)
    wanted = [
        (reason if reason.startswith("Node") else f"8/8 {reason}", None, reason, pod)
        for reason, pod in NO_GPU.items()
    ]
    selector = "node(s) didn't match Pod's node affinity/selector"
    ours = "the pod's nodeSelector wants the label zone=b"
    for reason, own, gate, pod in (*wanted, (selector, ours, "E-NODE", ELSEWHERE)):
        name = pod["metadata"]["name"]
        await cluster.create(pod)
        await until_reasons(cluster, name, reason)

        *found, data = await explained(cluster, name)

        assert [1, ("placement", gate), {own or reason}] == [*found, reasons_of(data)]
        await runs_as_advised(cluster, pod, data["changes"][0]["said"])


@pytest.mark.from_release((2, 10, 0), "it knows no cordon of a GPU")
async def test_a_cordon_reaches_the_scheduler_and_is_told_beside_a_bad_gpu(cluster, agent):
    sound, ill, *_ = cluster.gpu_uuids()
    await resident(cluster, gpus=7, **{"nvidia.com/nouse-gpuuuid": sound})
    await agent.simulate(LOST)
    await cluster.until_offered(70)
    await cluster.nodes.until(
        lambda: not registered_health(cluster.node_of()).get(ill, True), 20.0, "register"
    )
    # A read under way, of the Node as it was, would answer the handshake that the cordon removes.
    await until_taken_in(cluster)

    (await cluster.verb("cordon", "0", "--node", NODE)).succeeded()

    await until_taken_in(cluster, sound)
    await cluster.create(a_pod("shut-out", a_container(cores=10)))
    reasons = {"1/8 CardCordoned", "1/8 CardNotHealth", "6/8 CardInsufficientCore"}
    await until_reasons(cluster, "shut-out", *reasons)
    *found, data = await explained(cluster, "shut-out")
    assert [1, ("placement", "CardInsufficientCore")] == found
    assert reasons == reasons_of(data)
    by_index = {gpu["index"]: gpu["reason"] for gpu in data["nodes"][0]["gpus"]}
    assert {0: "CardCordoned", 1: "CardNotHealth"}.items() <= by_index.items()
    assert f"uncordon GPU 0 ({sound}) of {NODE}" == data["changes"][0]["said"]
    *held, data = await explained(cluster, "resident")
    assert [0, None] == held
    assert "CardNotHealth" == {one["name"]: one["reason"] for one in data["gates"]}["running"]

    (await cluster.verb("uncordon", "0", "--node", NODE)).succeeded()
    await until_taken_in(cluster)
    await runs_when_tried(cluster, "shut-out")
    assert sound in cluster.annotations_of("shut-out")[annotations.ALLOCATED]


async def until_taken_in(cluster, cordon=None):
    """Return once HAMi's scheduler has read the Node with that cordon. Raises TimeoutError."""

    def is_read():
        notes = notes_of(cluster.node_of())
        read = notes.get(annotations.HANDSHAKE, "").startswith("Requesting")
        return read and cordon == notes.get(annotations.CORDON)

    await cluster.nodes.until(is_read, WITHIN, "HAMi's scheduler does not read the Node")


async def runs_when_tried(cluster, name):
    """The pod waits for the next try alone, and a label brings that about, as `explain` advises."""
    for number in range(8):
        labels = {"metadata": {"labels": {"again": str(number)}}}
        await cluster.api.patch(f"{PODS}/{name}", labels)
        with contextlib.suppress(TimeoutError):
            await cluster.until_running(name, within=5.0)
            return
    raise TimeoutError(f"{name} does not run: {cluster.status_of(name)}")
