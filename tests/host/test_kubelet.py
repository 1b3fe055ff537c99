"""Register as the kubelet's side of the socket sees it, and what its answers become."""

import asyncio
import contextlib
import time
from functools import partial

import pytest
from grpclib import GRPCError
from grpclib.const import Status

from agent.errors import KubeletError, RegistrationRefused, WitnessThrottled, WitnessUnsupported
from agent.kubelet.register import register_plugin
from agent.ledger import Holding
from agent.model import SliceId
from agent.wire.v1 import (
    ContainerDevices,
    ContainerResources,
    GetPodResourcesResponse,
    ListPodResourcesResponse,
    NumaNode,
    PodResources,
    PodResourcesListerBase,
    TopologyInfo,
)
from agent.wire.v1beta1 import DevicePluginOptions, Empty, RegisterRequest, RegistrationBase
from agent.witness import FILE_NAME, PodResourcesWitness, read_records
from tests.fakes.offload import Inline
from tests.fakes.unix_grpc import dialled_in_vain, served

pytestmark = pytest.mark.looptime(False)

ENDPOINT = "hami-gpu-00000001.sock"
RESOURCE, NIC = "nvidia.com/gpu", "example.com/nic"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kubelet.sock"


class RecordedRegistration(RegistrationBase):
    def __init__(self, refusal=None):
        self.requests, self.refusal = [], refusal

    async def register(self, message):
        self.requests.append(message)
        if self.refusal is not None:
            raise self.refusal
        return Empty()


async def register(path, *, fenced=False):
    async with asyncio.timeout(2.0):
        await register_plugin(path, ENDPOINT, RESOURCE, fenced=fenced)


@pytest.mark.parametrize("fenced", [False, True])
async def test_the_request_says_who_we_are_and_what_we_offer(path, fenced):
    kubelet = RecordedRegistration()
    async with served(path, kubelet):
        await register(path, fenced=fenced)

    options = DevicePluginOptions(
        pre_start_required=fenced, get_preferred_allocation_available=True
    )
    assert [RegisterRequest("v1beta1", ENDPOINT, RESOURCE, options)] == kubelet.requests


@pytest.mark.parametrize(
    ("words", "told"), [('the ResourceName "x" is invalid',) * 2, ("x" * 5_000, "x" * 255 + "…")]
)
async def test_a_refusal_carries_the_kubelets_words_up_to_a_bound(path, words, told):
    kubelet = RecordedRegistration(GRPCError(Status.UNKNOWN, words))
    async with served(path, kubelet):
        with pytest.raises(RegistrationRefused) as caught:
            await register(path)

    assert told == str(caught.value)


async def test_a_kubelet_that_dies_during_the_call_is_no_refusal(path):
    async def die(_, writer):
        writer.close()

    async with await asyncio.start_unix_server(die, path):
        with pytest.raises(KubeletError) as caught:
            await register(path)

    assert not isinstance(caught.value, RegistrationRefused)


# PodResources: merged answers, and errors told apart by what the caller does about them.


def entry(resource, text, numa=None):
    """One id, as the kubelet sends it: an entry for each NUMA node."""
    topology = None if numa is None else TopologyInfo([NumaNode(numa)])
    return ContainerDevices(resource, [text], topology)


class Lister(PodResourcesListerBase):
    """The kubelet's service with the `pods`. `failure`: each call fails so, or hangs."""

    def __init__(self, *pods, failure=None):
        self.pods, self.failure = pods, failure

    async def _fail(self):
        if self.failure == "hangs":
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure

    async def get(self, message):
        await self._fail()
        for pod in self.pods:
            if (pod.namespace, pod.name) == (message.pod_namespace, message.pod_name):
                return GetPodResourcesResponse(pod)
        text = f"pod {message.pod_name} in namespace {message.pod_namespace} not found"
        raise GRPCError(Status.UNKNOWN, text)

    async def list(self, message):
        await self._fail()
        return ListPodResourcesResponse(list(self.pods))


@pytest.fixture
def deadline():
    return 10.0


@pytest.fixture
async def witness(path, deadline):
    witness = PodResourcesWitness(path, deadline=deadline)
    yield witness
    witness.close()


@pytest.mark.parametrize("who", ["registration", "witness"])
async def test_a_kubelet_that_is_not_there_or_dies_while_it_is_dialled_is_an_error(
    path, witness, who
):
    def ask():
        return register(path) if who == "registration" else witness.get("ns", "p")

    with pytest.raises(KubeletError, match=r"kubelet\.sock.*No such file"):
        await ask()
    assert KubeletError is type(await dialled_in_vain(path, ask()))


async def test_one_entry_for_each_id_and_numa_node_is_merged(path, witness):
    found = (entry(RESOURCE, "a", 0), entry(RESOURCE, "a", 1), entry(NIC, "a"))
    containers = [
        ContainerResources("main", [*found, entry(RESOURCE, "b", 0)]),
        ContainerResources("plain"),
    ]
    a, b = SliceId("a"), SliceId("b")
    merged = {RESOURCE: frozenset({a, b}), NIC: frozenset({a})}
    expected = Holding("ns", "p", {"main": merged, "plain": {}})
    async with served(path, Lister(PodResources("p", "ns", containers))):
        assert expected == await witness.get("ns", "p")
        assert (expected,) == await witness.list()
        assert {a, b} == expected.ids_of("main", RESOURCE)
        # A pod that the kubelet does not know.
        assert await witness.get("ns", "x" * 253) is None


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (Status.RESOURCE_EXHAUSTED, "rejected by rate limit", WitnessThrottled),
        (Status.UNIMPLEMENTED, "unknown method Get", WitnessUnsupported),
        (Status.UNKNOWN, "PodResources API Get method disabled", WitnessUnsupported),
        (Status.INTERNAL, "boom", KubeletError),
        (Status.UNKNOWN, "boom", KubeletError),
    ],
)
async def test_a_failure_is_told_apart_by_what_to_do_about_it(
    path, witness, status, text, expected
):
    async with served(path, Lister(failure=GRPCError(status, text))):
        for ask in (witness.get("ns", "p"), witness.list()):
            with pytest.raises(KubeletError, match=text) as caught:
                await ask
            assert expected is type(caught.value)


async def test_a_new_kubelet_is_asked_over_a_new_connection(path, witness):
    for name in ("first", "second", "third"):
        async with served(path, Lister(PodResources(name, "ns"))):
            for _ in range(2):
                assert (Holding("ns", name),) == await witness.list()

    with pytest.raises(KubeletError):
        await witness.list()


@pytest.mark.parametrize("deadline", [0.2])
async def test_an_agent_that_stood_still_for_longer_than_the_deadline_reads_the_answer(
    path, witness
):
    async with served(path, Lister()):
        asyncio.get_running_loop().call_soon(time.sleep, 0.4)  # noqa: TID251 -- it stands still

        assert await witness.get("ns", "p") is None


async def outlasted(witness, seconds):
    """Whether a deadline around a call that fails is kept. Else a caller ends without a word."""
    try:
        async with asyncio.timeout(seconds):
            with contextlib.suppress(KubeletError):
                await witness.get("ns", "p")
            await asyncio.Event().wait()
    except TimeoutError:
        return True


@pytest.mark.parametrize(("deadline", "dies"), [(0.1, False), (5.0, True)])
async def test_a_call_that_fails_leaves_the_deadlines_around_it_in_force(path, witness, dies):
    async with asyncio.TaskGroup() as group:
        async with served(path, Lister(failure="hangs")):
            if not dies:
                with pytest.raises(KubeletError, match=r"not answered within 0\.1 s"):
                    await witness.get("ns", "p")
            asking = group.create_task(outlasted(witness, 1.0))
            await asyncio.wait([asking], timeout=0.2 if dies else None)
        await asyncio.wait([asking])

    assert not asking.cancelled()
    assert asking.result()


async def test_a_caller_that_is_cancelled_as_its_kubelet_dies_ends(path, witness):
    async with asyncio.TaskGroup() as group, served(path, Lister(failure="hangs")):
        asking = group.create_task(outlasted(witness, 5.0))
        await asyncio.sleep(0.2)
        witness.close()  # as at the end of the process, which cancels its callers too
        asking.cancel()
        await asyncio.wait([asking], timeout=1.0)
        assert asking.cancelled()


async def test_an_answer_longer_than_4_mib_is_read(path, witness):
    container = ContainerResources("main", [entry(RESOURCE, "x" * 6_000_000)])
    async with served(path, Lister(PodResources("p", "ns", [container]))):
        (pod,) = await witness.list()

    assert {6_000_000} == {len(text) for text in pod.ids_of("main", RESOURCE)}


@pytest.mark.parametrize("malformed", [b"\x0a\x03\x0a\x01\xff", b"\x0a\xff\xff"])
async def test_an_answer_that_is_no_message_is_an_error(path, witness, monkeypatch, malformed):
    monkeypatch.setattr(ListPodResourcesResponse, "SerializeToString", lambda _: malformed)
    async with served(path, Lister()):
        with pytest.raises(KubeletError, match="malformed"):
            await witness.list()


# The kubelet's checkpoint file: read when it is there, silent when it is not.


async def test_of_an_absent_torn_or_unreadable_file_nothing_is_known(tmp_path):
    records = partial(read_records, tmp_path, Inline())
    assert None is await records(RESOURCE)
    (tmp_path / FILE_NAME).write_bytes(b'{"Data":')
    assert None is await records(RESOURCE)
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    assert None is await records(RESOURCE)
