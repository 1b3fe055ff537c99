"""The verbs that answer a question, beside the scheduler whose rules they repeat.

Why a pod is not placed is held to what HAMi's scheduler answered to kube-scheduler, word for word.
Then the first change that `explain` names is made, and the pod must run.
"""

import contextlib
import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pytest

from agent import cluster as annotations
from agent.sandbox.hardware_talk import HardwareRequest
from tests.peers.lab.api import JSON_PATCH, Object, RefusedError
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.control import NODE
from tests.peers.lab.node_state import notes_of, registered_health
from tests.peers.lab.part import until_answer
from tests.peers.lab.placing import WITHIN
from tests.peers.lab.pods import NAMESPACE, PODS, a_container, a_pod, stray
from tests.peers.lab.running import ACCOUNT

QUOTAS = "/api/v1/namespaces/default/resourcequotas"
LOST = HardwareRequest("xid", "1", 79)
pytestmark = pytest.mark.timeout(240)


_REASONS: Final = re.compile(r"0/1 nodes are available: 1 (.+?)\.(?: |$)")


@dataclass(frozen=True, slots=True)
class Explained:
    """What `explain` says of one pod."""

    code: int
    data: Mapping[str, Any]

    @property
    def blocked(self) -> tuple[str, str] | None:
        """The gate that says no, with its reason; None if none does."""
        shut = [one for one in self.data["gates"] if one["verdict"] == "blocked"]
        return (shut[0]["name"], shut[0]["reason"]) if shut else None

    @property
    def changes(self) -> list[str]:
        """What would place the pod, the smallest change first."""
        return [one["said"] for one in self.data["changes"]]

    @property
    def reasons(self) -> set[str]:
        """What keeps the pod off the Node that is told first, in HAMi's own words."""
        return set(self.data["nodes"][0]["reason"].split(", "))

    def gate(self, name: str) -> Mapping[str, Any]:
        """One gate. Raises StopIteration: there is none of that name."""
        found: Mapping[str, Any] = next(one for one in self.data["gates"] if one["name"] == name)
        return found

    def gpus(self) -> dict[int, str]:
        """By index, the reason of each GPU of the Node that is told first."""
        return {gpu["index"]: gpu["reason"] for gpu in self.data["nodes"][0]["gpus"]}


# What `explain` advises, done: the pod after the change that it names.

_DROP: Final = re.compile(r"drop the annotation (\S+)")
_LESS: Final = re.compile(r"ask for at most ([\d,]+) .*?\((nvidia\.com/\w+)\)")


def as_advised(pod: Object, said: str) -> Object:
    """The pod after that change, under another name. Raises AssertionError: it names none."""
    changed = copy.deepcopy(pod)
    metadata, spec = changed["metadata"], changed["spec"]
    metadata["name"] += "-again"
    if dropped := _DROP.fullmatch(said):
        del metadata["annotations"][dropped[1]]
    elif less := _LESS.match(said):
        spec["containers"][0]["resources"]["limits"][less[2]] = less[1].replace(",", "")
    elif said.startswith("drop nodeSelector,"):
        del spec["nodeSelector"]
    else:
        raise AssertionError(f"nothing to make of {said!r}")
    return changed


async def explain(cluster: Cluster, name: str) -> Explained:
    """What `explain` says of a pod of the tests. Raises AssertionError: it cannot."""
    answer = await cluster.verb("explain", f"{NAMESPACE}/{name}", "-o", "json")
    return Explained(answer.code, answer.document["data"])


def told_reasons(cluster: Cluster, name: str) -> set[str]:
    """What HAMi's scheduler said last of the one Node, by the pod's condition.

    Each is a reason of the Node, or one of its GPUs with how many of them it keeps out. An
    Event of kube-scheduler may still have the text of an attempt before the last one.
    """
    conditions = cluster.status_of(name).get("conditions") or ()
    texts = (one.get("message") or "" for one in conditions if one["type"] == "PodScheduled")
    found = _REASONS.match(next(texts, ""))
    return set(found[1].split(", ")) if found else set()


async def until_reasons(cluster: Cluster, name: str, *reasons: str) -> None:
    """Return once these are the reasons that were told last of a pod. Raises TimeoutError."""
    try:
        await cluster.pods.until(
            lambda: set(reasons) == told_reasons(cluster, name), 40.0, f"{name} is not {reasons}"
        )
    except TimeoutError as error:
        raise TimeoutError(f"{error}: {cluster.status_of(name)}") from None


def noted(pod, **notes):
    return {**pod, "metadata": {**pod["metadata"], "annotations": notes}}


async def gone(cluster, *names):
    for name in names:
        await cluster.delete(name, grace=0)
        await cluster.until_deleted(name)
    await cluster.until_unlocked()


async def runs_as_advised(cluster, pod, said):
    """The first change makes the pod run; then both are removed."""
    changed = as_advised(pod, said)
    name = changed["metadata"]["name"]
    await cluster.run(changed)
    await cluster.until_settled(name)
    await gone(cluster, pod["metadata"]["name"], name)


async def resident(cluster, *, gpus=8, memory=1000, cores=95):
    """A pod on each GPU; while it runs, HAMi's scheduler knows the Node."""
    await cluster.run(a_pod("resident", a_container(gpus=gpus, memory=memory, cores=cores)))
    await cluster.until_settled("resident")


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
        await cluster.create(pod)
        await until_reasons(cluster, name, reason)

        found = await explain(cluster, name)

        gate = "placement", reason.removeprefix("8/8 ")
        assert (1, gate, {reason}) == (found.code, found.blocked, found.reasons)
        await runs_as_advised(cluster, pod, found.changes[0])

    elsewhere = a_pod("elsewhere", a_container(cores=5), nodeSelector={"zone": "b"})
    await cluster.create(elsewhere)
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
    await cluster.create({**pod, "spec": held})
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


@pytest.mark.from_release((2, 10, 0), "it knows no cordon of a GPU")
async def test_a_cordon_reaches_the_scheduler_and_is_told_beside_a_bad_gpu(cluster, agent):
    sound, ill, *_ = cluster.gpu_uuids()
    full = a_pod("resident", a_container(gpus=7, memory=1000, cores=95))
    await cluster.run(noted(full, **{"nvidia.com/nouse-gpuuuid": sound}))
    await cluster.until_settled("resident")
    await agent.simulate(LOST)
    await cluster.until_offered(70)
    await cluster.nodes.until(
        lambda: not registered_health(cluster.node_of()).get(ill, True), 20.0, "register"
    )
    # A read under way, of the Node as it was, would answer the handshake that the cordon removes.
    await until_taken_in(cluster)

    cordoned = await cluster.verb("cordon", "0", "--node", NODE)

    assert 0 == cordoned.code, cordoned.errors
    await until_taken_in(cluster, sound)
    await cluster.create(a_pod("shut-out", a_container(cores=10)))
    reasons = {"1/8 CardCordoned", "1/8 CardNotHealth", "6/8 CardInsufficientCore"}
    await until_reasons(cluster, "shut-out", *reasons)
    found = await explain(cluster, "shut-out")
    assert (1, ("placement", "CardInsufficientCore")) == (found.code, found.blocked)
    assert reasons == found.reasons
    assert {0: "CardCordoned", 1: "CardNotHealth"}.items() <= found.gpus().items()
    assert f"uncordon the GPU {sound} of {NODE}" == found.changes[0]
    held = await explain(cluster, "resident")
    assert (0, None, "CardNotHealth") == (held.code, held.blocked, held.gate("running")["reason"])

    opened = await cluster.verb("uncordon", "0", "--node", NODE)
    assert 0 == opened.code, opened.errors
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


async def test_of_pods_that_run_and_that_were_refused_is_told_what_agent_and_kubelet_hold(cluster):
    await cluster.start_registered_agent(user=ACCOUNT)
    pair = a_pod("pair", a_container(gpus=2, memory=7000, cores=30), a_container("other", cores=20))
    await cluster.run(pair)
    await cluster.until_settled("pair")
    await cluster.create_by_hand(stray(a_pod("stray")))
    message = (await cluster.until_failed("stray"))["message"]
    (identifier,) = re.findall(r"\[(HA-\d{4})\]", message)

    running, refused = await explain(cluster, "pair"), await explain(cluster, "stray")

    assert (0, None) == (running.code, running.blocked)
    assert ["passed"] * 7 == [gate["verdict"] for gate in running.data["gates"]]
    assert holds_told(running) == shares_noted(cluster, "pair")
    assert (1, ("allocation", identifier)) == (refused.code, refused.blocked)
    (sentence,) = re.findall(r"desc = (.*?)\.? \[HA-", message)
    assert sentence in refused.gate("allocation")["said"]


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
    containers = [one["name"] for one in cluster.as_seen(name)["spec"]["containers"]]
    groups = cluster.annotations_of(name)[annotations.ALLOCATED].split(";")
    return sorted(
        (who, uuid, int(mib), int(cores))
        for who, group in zip(containers, groups, strict=False)
        for uuid, _, mib, cores in (share.split(",")[:4] for share in group.split(":") if share)
    )
