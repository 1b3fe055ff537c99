"""Register as the kubelet's side of the socket sees it, and what its answers become."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from grpclib import GRPCError
from grpclib.const import Status
from typing_extensions import override

from agent.errors import KubeletError, RegistrationRefused, WitnessThrottled, WitnessUnsupported
from agent.kubelet.register import register_plugin
from agent.ledger import Holding
from agent.model import SliceId
from agent.wire.v1 import (
    ContainerDevices,
    ContainerResources,
    GetPodResourcesRequest,
    GetPodResourcesResponse,
    ListPodResourcesRequest,
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
RESOURCE = "nvidia.com/gpu"


class RecordedRegistration(RegistrationBase):
    def __init__(self, refusal: GRPCError | None = None) -> None:
        self.requests: list[RegisterRequest] = []
        self.refusal = refusal

    @override
    async def register(self, message: RegisterRequest) -> Empty:
        self.requests.append(message)
        if self.refusal is not None:
            raise self.refusal
        return Empty()


async def register(path: Path, *, fenced: bool = False) -> None:
    async with asyncio.timeout(2.0):
        await register_plugin(path, ENDPOINT, RESOURCE, fenced=fenced)


@pytest.mark.parametrize("fenced", [False, True])
async def test_the_request_says_who_we_are_and_what_we_offer(tmp_path: Path, fenced):
    kubelet = RecordedRegistration()
    async with served(tmp_path / "kubelet.sock", kubelet):
        await register(tmp_path / "kubelet.sock", fenced=fenced)

    options = DevicePluginOptions(
        pre_start_required=fenced, get_preferred_allocation_available=True
    )
    assert [RegisterRequest("v1beta1", ENDPOINT, RESOURCE, options)] == kubelet.requests


@pytest.mark.parametrize(
    ("words", "told"), [('the ResourceName "x" is invalid',) * 2, ("x" * 5_000, "x" * 255 + "…")]
)
async def test_a_refusal_carries_the_kubelets_words_up_to_a_bound(
    tmp_path: Path, words: str, told: str
):
    kubelet = RecordedRegistration(GRPCError(Status.UNKNOWN, words))
    async with served(tmp_path / "kubelet.sock", kubelet):
        with pytest.raises(RegistrationRefused) as caught:
            await register(tmp_path / "kubelet.sock")

    assert told == str(caught.value)


async def test_a_kubelet_that_dies_during_the_call_is_no_refusal(tmp_path: Path):
    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_unix_server(die, tmp_path / "kubelet.sock")
    async with server:
        with pytest.raises(KubeletError) as caught:
            await register(tmp_path / "kubelet.sock")

    assert not isinstance(caught.value, RegistrationRefused)


# PodResources: merged answers, and errors told apart by what the caller does about them.


NIC = "example.com/nic"


def entry(resource: str, text: str, numa: int | None = None) -> ContainerDevices:
    """One id, as the kubelet sends it: an entry for each NUMA node."""
    topology = None if numa is None else TopologyInfo([NumaNode(numa)])
    return ContainerDevices(resource, [text], topology)


def ids(*texts: str) -> frozenset[SliceId]:
    return frozenset(map(SliceId, texts))


class Lister(PodResourcesListerBase):
    def __init__(self, *, hangs: bool = False) -> None:
        self.pods: dict[tuple[str, str], PodResources] = {}
        self.failure: Exception | None = None
        self.hangs = hangs

    async def _fail(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure

    @override
    async def get(self, message: GetPodResourcesRequest) -> GetPodResourcesResponse:
        await self._fail()
        key = (message.pod_namespace, message.pod_name)
        if key not in self.pods:
            text = f"pod {key[1]} in namespace {key[0]} not found"
            raise GRPCError(Status.UNKNOWN, text)
        return GetPodResourcesResponse(self.pods[key])

    @override
    async def list(self, message: ListPodResourcesRequest) -> ListPodResourcesResponse:
        await self._fail()
        return ListPodResourcesResponse(list(self.pods.values()))


@pytest_asyncio.fixture
async def witness(tmp_path: Path) -> AsyncIterator[PodResourcesWitness]:
    witness = PodResourcesWitness(tmp_path / "kubelet.sock")
    yield witness
    witness.close()


@pytest.mark.parametrize("who", ["registration", "witness"])
async def test_a_kubelet_that_is_not_there_or_dies_while_it_is_dialled_is_an_error(
    tmp_path: Path, witness: PodResourcesWitness, who: str
):
    path = tmp_path / "kubelet.sock"

    def ask():
        return register(path) if who == "registration" else witness.get("ns", "p")

    with pytest.raises(KubeletError, match=r"kubelet\.sock.*No such file"):
        await ask()
    assert KubeletError is type(await dialled_in_vain(path, ask()))


async def test_one_entry_for_each_id_and_numa_node_is_merged(
    tmp_path: Path, witness: PodResourcesWitness
):
    lister = Lister()
    entries = [
        entry(RESOURCE, "a", 0),
        entry(RESOURCE, "a", 1),
        entry(NIC, "a"),
        entry(RESOURCE, "b", 0),
    ]
    containers = [ContainerResources("main", entries), ContainerResources("plain")]
    lister.pods["ns", "p"] = PodResources("p", "ns", containers)
    async with served(tmp_path / "kubelet.sock", lister):
        merged = {RESOURCE: ids("a", "b"), NIC: ids("a")}
        expected = Holding("ns", "p", {"main": merged, "plain": {}})

        assert expected == await witness.get("ns", "p")
        assert (expected,) == await witness.list()
        assert ids("a", "b") == expected.ids_of("main", RESOURCE)


async def test_a_pod_that_the_kubelet_does_not_know_is_none(
    tmp_path: Path, witness: PodResourcesWitness
):
    async with served(tmp_path / "kubelet.sock", Lister()):
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
    tmp_path: Path,
    witness: PodResourcesWitness,
    status: Status,
    text: str,
    expected: type[KubeletError],
):
    lister = Lister()
    lister.failure = GRPCError(status, text)
    async with served(tmp_path / "kubelet.sock", lister):
        for ask in (witness.get("ns", "p"), witness.list()):
            with pytest.raises(KubeletError, match=text) as caught:
                await ask
            assert expected is type(caught.value)


async def test_a_new_kubelet_is_asked_over_a_new_connection(
    tmp_path: Path, witness: PodResourcesWitness
):
    lister = Lister()
    for name in ("first", "second", "third"):
        lister.pods = {("ns", name): PodResources(name, "ns")}
        async with served(tmp_path / "kubelet.sock", lister):
            assert (Holding("ns", name),) == await witness.list()
            assert (Holding("ns", name),) == await witness.list()

    with pytest.raises(KubeletError):
        await witness.list()


async def test_an_agent_that_stood_still_for_longer_than_the_deadline_reads_the_answer(
    tmp_path: Path,
):
    witness = PodResourcesWitness(tmp_path / "kubelet.sock", deadline=0.2)
    async with served(tmp_path / "kubelet.sock", Lister()):
        asyncio.get_running_loop().call_soon(time.sleep, 0.4)  # noqa: TID251 -- it stands still

        assert await witness.get("ns", "p") is None
    witness.close()


async def outlasted(witness: PodResourcesWitness, seconds: float) -> bool:
    """Whether a deadline around a call that fails is kept. Else a caller ends without a word."""
    try:
        async with asyncio.timeout(seconds):
            with contextlib.suppress(KubeletError):
                await witness.get("ns", "p")
            await asyncio.Event().wait()
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize(("deadline", "dies"), [(0.1, False), (5.0, True)])
async def test_a_call_that_fails_leaves_the_deadlines_around_it_in_force(
    tmp_path: Path, deadline, dies
):
    witness = PodResourcesWitness(tmp_path / "kubelet.sock", deadline=deadline)
    async with asyncio.TaskGroup() as group:
        async with served(tmp_path / "kubelet.sock", Lister(hangs=True)):
            if not dies:
                with pytest.raises(KubeletError, match=r"not answered within 0\.1 s"):
                    await witness.get("ns", "p")
            asking = group.create_task(outlasted(witness, 1.0))
            await asyncio.sleep(0.2)
            if not dies:
                await asyncio.wait([asking])
        await asyncio.wait([asking])
    witness.close()

    assert not asking.cancelled()
    assert asking.result()


async def test_a_caller_that_is_cancelled_as_its_kubelet_dies_ends(tmp_path: Path):
    lister = Lister(hangs=True)
    witness = PodResourcesWitness(tmp_path / "kubelet.sock", deadline=5.0)
    async with asyncio.TaskGroup() as group, served(tmp_path / "kubelet.sock", lister):
        asking = group.create_task(outlasted(witness, 5.0))
        await asyncio.sleep(0.2)
        witness.close()  # as at the end of the process, which cancels its callers too
        asking.cancel()
        await asyncio.wait([asking], timeout=1.0)
        assert asking.cancelled()


async def test_an_answer_longer_than_4_mib_is_read(tmp_path: Path):
    lister = Lister()
    lister.pods["ns", "p"] = PodResources(
        "p", "ns", [ContainerResources("main", [ContainerDevices(RESOURCE, ["x" * 6_000_000])])]
    )
    witness = PodResourcesWitness(tmp_path / "kubelet.sock", deadline=5.0)
    async with served(tmp_path / "kubelet.sock", lister):
        (pod,) = await witness.list()

    assert {6_000_000} == {len(text) for text in pod.ids_of("main", RESOURCE)}
    witness.close()


@pytest.mark.parametrize("malformed", [b"\x0a\x03\x0a\x01\xff", b"\x0a\xff\xff"])
async def test_an_answer_that_is_no_message_is_an_error(
    tmp_path: Path, witness: PodResourcesWitness, malformed: bytes
):
    class Broken(ListPodResourcesResponse):
        @override
        def SerializeToString(self) -> bytes:
            return malformed

    class BrokenLister(PodResourcesListerBase):
        @override
        async def list(self, message: ListPodResourcesRequest) -> ListPodResourcesResponse:
            return Broken()

    async with served(tmp_path / "kubelet.sock", BrokenLister()):
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
