"""The verbs that answer a question, beside the scheduler whose rules they repeat.

Why a pod is not placed is held to what HAMi's scheduler answered to kube-scheduler, word for word.
Then the first change that `explain` names is made, and the pod must run.
"""

import contextlib
import re

import pytest

from agent import cluster as annotations
from agent.sandbox.hardware_talk import HardwareRequest
from tests.peers.lab.api import JSON_PATCH, RefusedError
from tests.peers.lab.cluster import ACCOUNT
from tests.peers.lab.identities import NODE
from tests.peers.lab.node_state import (
    gpu_uuids,
    node_of,
    notes_of,
    registered_health,
    until_offered,
    until_unlocked,
)
from tests.peers.lab.placement import create_by_hand
from tests.peers.lab.placing import WITHIN
from tests.peers.lab.pods import (
    PODS,
    a_container,
    a_pod,
    annotations_of,
    as_seen,
    create,
    delete,
    run,
    status_of,
    stray,
    until_deleted,
    until_failed,
    until_running,
    until_settled,
)
from tests.peers.lab.space import until_answer
from tests.peers.lab.verbs import as_advised, doctor, explain, until_reasons, verb

QUOTAS = "/api/v1/namespaces/default/resourcequotas"
LOST = HardwareRequest("xid", "1", 79)
pytestmark = pytest.mark.timeout(240)


def noted(pod, **notes):
    return {**pod, "metadata": {**pod["metadata"], "annotations": notes}}


async def gone(cluster, *names):
    for name in names:
        await delete(cluster, name, grace=0)
        await until_deleted(cluster, name)
    await until_unlocked(cluster)


async def runs_as_advised(cluster, pod, said):
    """The first change makes the pod run; then both are removed."""
    changed = as_advised(pod, said)
    name = changed["metadata"]["name"]
    await run(cluster, changed)
    await until_settled(cluster, name)
    await gone(cluster, pod["metadata"]["name"], name)


async def resident(cluster, *, gpus=8, memory=1000, cores=95):
    """A pod on each GPU; while it runs, HAMi's scheduler knows the Node."""
    await run(cluster, a_pod("resident", a_container(gpus=gpus, memory=memory, cores=cores)))
    await until_settled(cluster, "resident")


async def test_what_no_gpu_has_is_named_as_the_scheduler_does_and_the_first_change_places_the_pod(
    cluster, agent
):
    await resident(cluster)
    wanted = {
        "8/8 CardTypeMismatch": noted(
            a_pod("typed", a_container(cores=5)), **{"nvidia.com/use-gputype": "A100"}
        ),
        "8/8 CardUuidMismatch": noted(
            a_pod("chosen", a_container(cores=5)), **{"nvidia.com/use-gpuuuid": "GPU-none"}
        ),
        "8/8 ExclusiveDeviceAllocateConflict": noted(
            a_pod("alone", a_container(cores=5)), **{"hami.io/gpu-scheduler-policy": "mutex"}
        ),
        "8/8 CardInsufficientMemory": a_pod("whole", a_container(memory=None, cores=5)),
        "8/8 CardInsufficientCore": a_pod("busy", a_container(cores=10)),
        "NodeInsufficientDevice": a_pod("many", a_container(gpus=9, cores=5)),
    }
    for reason, pod in wanted.items():
        name = pod["metadata"]["name"]
        await create(cluster, pod)
        await until_reasons(cluster, name, reason)

        found = await explain(cluster, name)

        gate = "placement", reason.removeprefix("8/8 ")
        assert (1, gate, {reason}) == (found.code, found.blocked, found.reasons)
        await runs_as_advised(cluster, pod, found.changes[0])

    elsewhere = a_pod("elsewhere", a_container(cores=5), nodeSelector={"zone": "b"})
    await create(cluster, elsewhere)
    refused = "node(s) didn't match Pod's node affinity/selector"
    await until_reasons(cluster, "elsewhere", refused)
    found = await explain(cluster, "elsewhere")
    assert (1, ("placement", "E-NODE")) == (found.code, found.blocked)
    assert {"the pod's nodeSelector wants the label zone=b"} == found.reasons
    await runs_as_advised(cluster, elsewhere, found.changes[0])


async def test_a_quota_without_room_is_named_and_less_memory_fits_it(cluster, agent):
    await resident(cluster, gpus=1, memory=8000)
    pod = a_pod("greedy", a_container(memory=3000, cores=5))
    # Its quota comes after the review of the webhook, and before the scheduler may look.
    held = {**pod["spec"], "schedulingGates": [{"name": "peers.test/quota"}]}
    await create(cluster, {**pod, "spec": held})
    gated = await explain(cluster, "greedy")
    assert (1, ("admission", "E-GATED")) == (gated.code, gated.blocked)
    async with a_quota(cluster, {"limits.nvidia.com/gpumem": "10000"}):
        await until_denied(cluster, a_pod("probe", a_container(memory=3000, cores=5)))
        opened = [{"op": "remove", "path": "/spec/schedulingGates"}]
        await cluster.api.patch(f"{PODS}/greedy", opened, JSON_PATCH)
        await until_reasons(cluster, "greedy", "8/8 ResourceQuotaNotFit")

        found = await explain(cluster, "greedy")

        assert (1, ("quota", "ResourceQuotaNotFit")) == (found.code, found.blocked)
        assert {"8/8 ResourceQuotaNotFit"} == found.reasons
        assert "peers: 8,000 MiB of 10,000 MiB are held" == found.gate("quota")["facts"][0]
        await runs_as_advised(cluster, pod, found.changes[0])


@contextlib.asynccontextmanager
async def a_quota(cluster, hard):
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "peers"}}
    await cluster.api.create(QUOTAS, {**quota, "spec": {"hard": hard}})
    try:
        yield
    finally:
        await cluster.api.delete(f"{QUOTAS}/peers")


async def until_denied(cluster, pod):
    """Return once the webhook refuses such a pod for its quota. Raises TimeoutError."""

    async def is_denied():
        try:
            await cluster.api.create(f"{PODS}?dryRun=All", pod)
        except RefusedError as error:
            return "quota" in str(error)
        return False

    await until_answer(is_denied, 20.0, lambda: "the webhook does not know the quota")


async def test_a_cordon_reaches_the_scheduler_and_is_told_beside_a_bad_gpu(cluster, agent):
    sound, ill, *_ = gpu_uuids(cluster)
    full = a_pod("resident", a_container(gpus=7, memory=1000, cores=95))
    await run(cluster, noted(full, **{"nvidia.com/nouse-gpuuuid": sound}))
    await until_settled(cluster, "resident")
    await agent.simulate(LOST)
    await until_offered(cluster, 70)
    await cluster.nodes.until(
        lambda: not registered_health(node_of(cluster)).get(ill, True), 20.0, "register"
    )
    # A read under way, of the Node as it was, would answer the handshake that the cordon removes.
    await until_taken_in(cluster)

    cordoned = await verb(cluster, "cordon", "0", "--node", NODE)

    assert 0 == cordoned.code, cordoned.errors
    await until_taken_in(cluster, sound)
    await create(cluster, a_pod("shut-out", a_container(cores=10)))
    reasons = {"1/8 CardCordoned", "1/8 CardNotHealth", "6/8 CardInsufficientCore"}
    await until_reasons(cluster, "shut-out", *reasons)
    found = await explain(cluster, "shut-out")
    assert (1, ("placement", "CardInsufficientCore")) == (found.code, found.blocked)
    assert reasons == found.reasons
    assert {0: "CardCordoned", 1: "CardNotHealth"}.items() <= found.gpus().items()
    assert f"uncordon the GPU {sound} of {NODE}" == found.changes[0]
    held = await explain(cluster, "resident")
    assert (0, None, "CardNotHealth") == (held.code, held.blocked, held.gate("running")["reason"])

    opened = await verb(cluster, "uncordon", "0", "--node", NODE)
    assert 0 == opened.code, opened.errors
    await until_taken_in(cluster)
    await runs_when_tried(cluster, "shut-out")
    assert sound in annotations_of(cluster, "shut-out")[annotations.ALLOCATED]


async def until_taken_in(cluster, cordon=None):
    """Return once HAMi's scheduler has read the Node with that cordon. Raises TimeoutError."""

    def is_read():
        notes = notes_of(node_of(cluster))
        read = notes.get(annotations.HANDSHAKE, "").startswith("Requesting")
        return read and cordon == notes.get(annotations.CORDON)

    await cluster.nodes.until(is_read, WITHIN, "HAMi's scheduler does not read the Node")


async def runs_when_tried(cluster, name):
    """The pod waits for the next try alone, and a label brings that about, as `explain` advises."""
    for number in range(8):
        labels = {"metadata": {"labels": {"again": str(number)}}}
        await cluster.api.patch(f"{PODS}/{name}", labels)
        with contextlib.suppress(TimeoutError):
            await until_running(cluster, name, within=5.0)
            return
    raise TimeoutError(f"{name} does not run: {status_of(cluster, name)}")


async def test_of_pods_that_run_and_that_were_refused_the_verbs_tell_what_agent_and_kubelet_hold(
    cluster,
):
    agent = await cluster.start_registered_agent(user=ACCOUNT)
    pair = a_pod("pair", a_container(gpus=2, memory=7000, cores=30), a_container("other", cores=20))
    await run(cluster, pair)
    await until_settled(cluster, "pair")
    await create_by_hand(cluster, stray(a_pod("stray")))
    message = (await until_failed(cluster, "stray"))["message"]
    (identifier,) = re.findall(r"\[(HA-\d{4})\]", message)

    running, refused = await explain(cluster, "pair"), await explain(cluster, "stray")

    assert (0, None) == (running.code, running.blocked)
    assert ["passed"] * 7 == [gate["verdict"] for gate in running.data["gates"]]
    assert holds_told(running) == shares_noted(cluster, "pair")
    assert (1, ("allocation", identifier)) == (refused.code, refused.blocked)
    (sentence,) = re.findall(r"desc = (.*?)\.? \[HA-", message)
    assert sentence in refused.gate("allocation")["said"]

    by_objects = await verb(cluster, "status", "--node", NODE, "-o", "json")
    by_agent = await verb(cluster, "status", "-o", "json", on_node=True)
    assert (5, 0) == (by_objects.code, by_agent.code), by_objects.errors + by_agent.errors
    assert promised(by_objects) == promised(by_agent)
    assert holders(by_objects) == holders(by_agent)
    assert {("pair", "main"), ("pair", "other")} == {who[:2] for who in holders(by_agent)}

    well = (await doctor(cluster, agent)).document["data"]
    assert [] == [one for one in well["findings"] if one["verdict"] == "wrong"]
    await agent.part.stop()
    ill = await doctor(cluster, agent)
    assert 1 == ill.code
    assert "agent" in {
        one["group"] for one in ill.document["data"]["findings"] if one["verdict"] == "wrong"
    }


def holds_told(found):
    """Container, GPU and MiB of each share that `explain` tells."""
    pattern = re.compile(r"(\S+): GPU \d+ \((\S+)\), ([\d,]+) MiB, (\d+) % of the cores")
    shares = found.gate("running")["facts"]
    texts = [pattern.fullmatch(text).groups() for text in shares]
    return sorted(
        (who, gpu, int(mib.replace(",", "")), int(cores)) for who, gpu, mib, cores in texts
    )


def shares_noted(cluster, name):
    """The same as the scheduler has noted it; read by nothing of ours."""
    containers = [one["name"] for one in as_seen(cluster, name)["spec"]["containers"]]
    groups = annotations_of(cluster, name)[annotations.ALLOCATED].split(";")
    return sorted(
        (who, uuid, int(mib), int(cores))
        for who, group in zip(containers, groups, strict=False)
        for uuid, _, mib, cores in (share.split(",")[:4] for share in group.split(":") if share)
    )


def promised(answer):
    """By GPU, slices, MiB and cores that pods hold."""
    fields = ("slicesHeld", "promisedMib", "promisedCores", "sellableMib", "slices", "condition")
    return {
        gpu["uuid"]: [gpu[field] for field in fields] for gpu in answer.document["data"]["gpus"]
    }


def holders(answer):
    """Pod, container and shares of all who hold something."""
    return {
        (
            one["pod"],
            one["container"],
            *sorted((s["uuid"], s["memoryMib"], s["cores"]) for s in one["shares"]),
        )
        for one in answer.document["data"]["allocations"]
    }
