"""PodResources: merged answers, and errors told apart by what the caller does about them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from grpclib import GRPCError
from grpclib.const import Status
from typing_extensions import override

from agent.errors import KubeletError, WitnessThrottled, WitnessUnsupported
from agent.ledger import ContainerHolding, Holding
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
from agent.witness import PodResourcesWitness
from tests.fakes.unix_grpc import dialled_in_vain, served

pytestmark = pytest.mark.looptime(False)

GPU, NIC = "nvidia.com/gpu", "example.com/nic"


def entry(resource: str, text: str, numa: int | None = None) -> ContainerDevices:
    """One id, as the kubelet sends it: an entry for each NUMA node."""
    topology = None if numa is None else TopologyInfo([NumaNode(numa)])
    return ContainerDevices(resource, [text], topology)


def ids(*texts: str) -> frozenset[SliceId]:
    return frozenset(map(SliceId, texts))


class Lister(PodResourcesListerBase):
    def __init__(self) -> None:
        self.pods: dict[tuple[str, str], PodResources] = {}
        self.failure: Exception | None = None
        self.hangs = False

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


async def test_one_entry_for_each_id_and_numa_node_is_merged(
    tmp_path: Path, witness: PodResourcesWitness
):
    lister = Lister()
    entries = [entry(GPU, "a", 0), entry(GPU, "a", 1), entry(NIC, "a"), entry(GPU, "b", 0)]
    containers = [ContainerResources("main", entries), ContainerResources("plain")]
    lister.pods["ns", "p"] = PodResources("p", "ns", containers)
    async with served(tmp_path / "kubelet.sock", lister):
        merged = {GPU: ids("a", "b"), NIC: ids("a")}
        expected = Holding("ns", "p", (ContainerHolding("main", merged), ContainerHolding("plain")))

        assert expected == await witness.get("ns", "p")
        assert (expected,) == await witness.list()
        assert ids("a", "b") == expected.ids_of("main", GPU)


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


async def test_a_missing_socket_is_an_error_and_the_next_call_tries_again(
    tmp_path: Path, witness: PodResourcesWitness
):
    with pytest.raises(KubeletError, match=r"kubelet\.sock"):
        await witness.list()

    async with served(tmp_path / "kubelet.sock", Lister()):
        assert () == await witness.list()


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


async def test_a_kubelet_that_dies_while_it_is_dialled_gives_no_answer(
    tmp_path: Path, witness: PodResourcesWitness
):
    ask = witness.get("ns", "p")

    assert KubeletError is type(await dialled_in_vain(tmp_path / "kubelet.sock", ask))


async def test_a_kubelet_that_does_not_answer_is_given_up(tmp_path: Path):
    lister = Lister()
    lister.hangs = True
    witness = PodResourcesWitness(tmp_path / "kubelet.sock", deadline=0.1)
    async with served(tmp_path / "kubelet.sock", lister):
        with pytest.raises(KubeletError, match=r"not answered within 0\.1 s"):
            await witness.get("ns", "p")
    witness.close()


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


async def test_a_call_that_is_given_up_leaves_the_deadlines_around_it_in_force(tmp_path: Path):
    lister = Lister()
    lister.hangs = True
    witness = PodResourcesWitness(tmp_path / "kubelet.sock", deadline=0.1)
    async with served(tmp_path / "kubelet.sock", lister):
        assert await outlasted(witness, 0.3)
    witness.close()


async def test_a_kubelet_that_dies_during_a_call_leaves_the_deadlines_around_it_in_force(
    tmp_path: Path,
):
    lister = Lister()
    lister.hangs = True
    witness = PodResourcesWitness(tmp_path / "kubelet.sock", deadline=5.0)
    async with asyncio.TaskGroup() as group:
        async with served(tmp_path / "kubelet.sock", lister):
            asking = group.create_task(outlasted(witness, 1.0))
            await asyncio.sleep(0.2)
        await asyncio.wait([asking])
    witness.close()

    assert not asking.cancelled()
    assert asking.result()


async def test_a_caller_that_is_cancelled_as_its_kubelet_dies_ends(tmp_path: Path):
    lister = Lister()
    lister.hangs = True
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
        "p", "ns", [ContainerResources("main", [ContainerDevices(GPU, ["x" * 6_000_000])])]
    )
    witness = PodResourcesWitness(tmp_path / "kubelet.sock", deadline=5.0)
    async with served(tmp_path / "kubelet.sock", lister):
        (pod,) = await witness.list()

    assert {6_000_000} == {len(text) for text in pod.ids_of("main", GPU)}
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
