"""What the kubelet model does that is not tried on a real kubelet: its times, a reboot, the panic.

`tests/peers/test_kubelet_*.py` ask the model and the original the same.
"""

import asyncio
import datetime as dt
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from agent.sandbox.kubelet import checkpoint
from agent.sandbox.kubelet.checkpoint import Checkpoint, CheckpointEntry, CheckpointError
from agent.sandbox.kubelet.endpoint import go_text
from agent.sandbox.kubelet.model import Timings
from agent.sandbox.kubelet.pods import KubeletEvent, read_pod
from agent.sandbox.store import Json
from agent.wire.v1 import ListPodResourcesRequest
from tests.fakes.plugin import devices
from tests.peers.lab.nodes import ModelNode, ProbePlugin, open_model_node
from tests.peers.lab.pods import a_pod, stray

FOREVER = 600.0
"""Seconds on virtual time: a wait that ends with them has failed."""


@asynccontextmanager
async def a_node(tmp_path: Path, count: int = 4) -> AsyncIterator[tuple[ModelNode, ProbePlugin]]:
    """A kubelet with the times of the real one, and a plugin with `count` healthy ids."""
    async with open_model_node(tmp_path, Timings(), 10.0) as node, node.plugin(count) as plugin:
        yield node, plugin


async def seen(node: ModelNode, kind, times: int = 1) -> list[KubeletEvent]:
    """The events of that kind, as soon as there are so many."""
    history = node.model.history
    await node.until(lambda: len(history.of(kind)) >= times, f"not {times} {kind}", FOREVER)
    return history.of(kind)


def now() -> float:
    return asyncio.get_running_loop().time()


# Errors of a plugin, as Go prints them.


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GRPCError(Status.CANCELLED, "x"), "rpc error: code = Canceled desc = x"),
        (GRPCError(Status.DATA_LOSS, None), "rpc error: code = DataLoss desc = "),
        (GRPCError(Status.OUT_OF_RANGE, "é"), "rpc error: code = OutOfRange desc = é"),
        (
            ConnectionRefusedError("refused"),
            'rpc error: code = Unavailable desc = connection error: desc = "refused"',
        ),
        (
            StreamTerminatedError("gone"),
            "rpc error: code = Unavailable desc = error reading from server: EOF",
        ),
    ],
)
def test_errors_read_as_go_prints_them(error, expected):
    assert expected == go_text(error)


# The kubelet's checkpoint file: bytes, checksum, and what a new kubelet makes of it.

WHOLE = Checkpoint(
    entries=(
        CheckpointEntry(
            "2b1c3f5e-0001-4a6b-9c7d-000000000001",
            "train",
            "nvidia.com/gpu",
            {-1: ("GPU-a-0",), 0: ("GPU-b-3", "GPU-b-1"), 10: ("GPU-c-9",), 2: ("GPU-d-2",)},
            bytes([10, 3, 0, 255, 7]),
        ),
        CheckpointEntry("2b1c3f5e-0001-4a6b-9c7d-000000000002", "größe", "example.com/x", {}, b""),
    ),
    registered={
        "nvidia.com/gpu": ("GPU-b-3", "GPU-a-0"),
        "example.com/x": (),
        "b.example/é": ("<&>",),
    },
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (WHOLE, 1698485784),
        (Checkpoint((), {"nvidia.com/gpu": ("GPU-a-0",)}), 570081339),
        (Checkpoint((), {}), 3467439661),
    ],
)
def test_the_checksum_is_the_one_that_go_computes(content, expected):
    assert expected == checkpoint.checksum(content)


def test_the_bytes_are_those_of_gos_encoder():
    content = Checkpoint(
        (CheckpointEntry("u", "c", "r", {10: ("b",), 2: ("a<b>&",), -1: ("é",)}, b"\x01"),),
        {"z": (), "a": ()},
    )

    assert (
        '{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"r",'
        '"DeviceIDs":{"-1":["é"],"10":["b"],"2":["a\\u003cb\\u003e\\u0026"]},"AllocResp":"AQ=="}],'
        f'"RegisteredDevices":{{"a":[],"z":[]}}}},"Checksum":{checkpoint.checksum(content)}}}'
    ).encode() == checkpoint.encode(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["PodDeviceEntries"][0].update(PodUID="x"),
        lambda data: data["PodDeviceEntries"][1].update(ContainerName="x"),
        lambda data: data["PodDeviceEntries"][1].update(ResourceName="x"),
        lambda data: data["PodDeviceEntries"][0].update(AllocResp="bW9yZQ=="),
        lambda data: data["RegisteredDevices"].pop("example.com/x"),
        lambda data: data["RegisteredDevices"]["nvidia.com/gpu"].reverse(),
        lambda data: data["PodDeviceEntries"].reverse(),
        lambda data: data["PodDeviceEntries"][0]["DeviceIDs"].update({"3": []}),
        lambda data: data["PodDeviceEntries"][0]["DeviceIDs"]["0"].reverse(),
        lambda data: data.update(PodDeviceEntries=None),
    ],
)
def test_a_changed_field_list_or_map_is_refused(change):
    document = json.loads(checkpoint.encode(WHOLE))
    change(document["Data"])

    with pytest.raises(CheckpointError, match="corrupted"):
        checkpoint.decode(json.dumps(document).encode())


# What a reboot does to pods that were admitted.


def a_stored_pod(node: ModelNode, uid: str, created: str = "2026-08-21T06:20:39Z") -> Json:
    """For a kubelet without an API server."""
    metadata = {"name": uid, "namespace": "default", "uid": uid, "creationTimestamp": created}
    return {"metadata": metadata, "spec": {"containers": [node.container()]}}


async def test_a_reboot_with_a_lost_checkpoint_allocates_in_order_of_creation(tmp_path):
    async with a_node(tmp_path) as (node, plugin):
        for uid, second in {"late": 42, "early": 40}.items():
            await node.model.admit(a_stored_pod(node, uid, f"2026-08-21T06:20:{second}Z"))

        await node.model.restart(lose_checkpoint=True, reboot=True)
        await node.come_back(plugin)

        assert ["late", "early", "early", "late"] == [
            event.pod for event in await seen(node, "allocated", 4)
        ]


async def test_a_plugin_that_is_back_within_09_seconds_saves_every_pod(tmp_path):
    async with a_node(tmp_path) as (node, plugin):
        await node.runs("p")
        await node.model.restart(reboot=True)
        await asyncio.sleep(0.85)
        await plugin.serve()
        await plugin.register()

        await seen(node, "admitted", 2)
        assert [] == node.model.history.of("rejected")


async def test_a_rejection_that_was_not_told_is_judged_again_by_the_next_kubelet(tmp_path):
    async with a_node(tmp_path) as (node, plugin):
        await node.runs("p")
        await node.kill()
        await node.end_container("p")
        await node.start()
        await seen(node, "rejected")
        await asyncio.sleep(3)
        assert "Running" == node.phase("p"), "told only with the first full report"

        await node.restart()
        await asyncio.sleep(0.5)
        await plugin.serve()
        await plugin.register()
        await seen(node, "admitted", 2)
        await node.stays(lambda: node.phase("p") == "Running", "it failed", 60)


# What a pod takes, and what it leaves.


@pytest.mark.parametrize(
    ("inits", "apps", "expected"),
    [
        ([], [1, 2], 3),
        ([("init", 5)], [1, 2], 5),
        ([("sidecar", 2), ("init", 2)], [1], 4),
        ([("init", 2), ("sidecar", 2)], [1], 3),
    ],
)
async def test_a_pod_requests_the_greater_of_its_phases(tmp_path, inits, apps, expected):
    node = ModelNode(tmp_path)
    pod = a_stored_pod(node, "p")
    pod["spec"]["initContainers"] = [getattr(node, kind)(kind, count=n) for kind, n in inits]
    pod["spec"]["containers"] = [node.container(f"a{n}", count=n) for n in apps]

    assert expected == read_pod(pod).request(node.resource)


async def test_a_job_ends_succeeded_and_frees_its_ids(tmp_path):
    async with a_node(tmp_path, 1) as (node, _):
        job = stray(a_pod(node.known_as("job"), node.container()))
        job["metadata"]["annotations"] = {"sandbox/run-seconds": "40"}
        await node.submit(job)
        await node.until_phase("job", "Running")
        started = now()
        await node.until(lambda: node.phase("job") == "Succeeded", "it runs on", FOREVER)

        assert 40 == pytest.approx(now() - started, abs=0.2)
        assert 0 == node.state("job")["terminated"]["exitCode"]
        await node.runs("next")
        await node.delete("job")
        await node.until(lambda: 1 == len(node.model.node.pods), "the kubelet knows the job")


async def test_what_other_active_pods_ask_for_counts_as_used(tmp_path):
    """The init phase of the first pod needs 3 and what stays needs 2; the Node then offers 3."""
    async with a_node(tmp_path) as (node, plugin):
        await asyncio.sleep(60)
        await node.runs("u1", inits=(node.init(count=3), node.sidecar()))
        await asyncio.sleep(1)  # the kubelet goes by whole seconds of creation
        ended = node.state("u1", "init")["terminated"]
        for key in ("startedAt", "finishedAt"):
            since = node.model.clock.now() - dt.datetime.fromisoformat(ended[key])
            assert 0 <= since.total_seconds() < 5, key
        await node.runs("u2")
        plugin.publish(devices(3))
        await node.until_counted(3, 3)

        await node.restart(lose_checkpoint=True)

        text = (await node.until_phase("u2", "Failed"))["message"]
        assert text.endswith("requested: 1, used: 3, capacity: 3")
        assert "Running" == node.phase("u1")


async def test_a_refused_call_frees_its_ids_at_once(tmp_path):
    async with a_node(tmp_path, 1) as (node, plugin):
        plugin.script.refusals.append(GRPCError(Status.FAILED_PRECONDITION, "not now"))
        await node.fails("p")
        await node.runs("q")


async def test_the_end_of_a_pod_waits_for_the_admission_that_is_going_on(tmp_path):
    async with a_node(tmp_path) as (node, plugin):
        await node.runs("u1")
        plugin.hold()
        await node.create("u2")
        await node.until(lambda: 2 == len(plugin.asked), "no Allocate")
        await node.delete("u1", grace=1)
        await node.stays(lambda: node.pod("u1"), "it has ended", 60)

        plugin.let_go()
        await node.until_gone("u1")


# Containers that start and die beside admission, and how the kubelet panics of it.


async def a_container_dies(node: ModelNode, plugin: ProbePlugin) -> None:
    """Its record is lost, and the plugin's answers are held."""
    await node.runs("u1")
    await node.restart(lose_checkpoint=True)
    await node.come_back(plugin)
    await node.runs("late", node.container(count=0))  # it has heard of everything
    plugin.calls.clear()
    plugin.hold()
    await node.end_container("u1")


async def a_call_is_held(node: ModelNode, plugin: ProbePlugin) -> asyncio.Event:
    """A container whose record is lost is being asked for; what lets its answer go."""
    await a_container_dies(node, plugin)
    await node.until(lambda: plugin.calls, "no Allocate")
    gate, plugin.script.gate = plugin.script.gate, None
    assert gate is not None
    return gate


async def test_a_dead_container_is_not_asked_for_while_an_admission_is_going_on(tmp_path):
    async with a_node(tmp_path) as (node, plugin):
        await a_container_dies(node, plugin)
        await node.create("new")
        await node.until(lambda: plugin.calls, "no Allocate")
        await node.stays(lambda: 1 == len(plugin.calls), "a worker asks beside it", 60)

        plugin.let_go()
        await node.until_restarted("u1")
        assert 2 == len(plugin.calls)


async def test_an_earlier_call_that_is_granted_beside_a_later_one_panics_the_kubelet(tmp_path):
    async with a_node(tmp_path) as (node, plugin):
        gate = await a_call_is_held(node, plugin)
        await node.runs("new")

        gate.set()

        (panic,) = await seen(node, "panicked")
        assert "assignment to entry in nil map" == panic.text
        await seen(node, "started", 3)
        await plugin.serve()
        await plugin.register()
        await seen(node, "admitted", 7)
        assert [] == node.model.history.of("rejected"), "the plugin was back in time: all run on"
        assert {"Running"} == {node.phase(name) for name in ("u1", "late", "new")}


async def test_an_earlier_call_that_is_refused_beside_a_later_one_harms_nobody(tmp_path):
    async with a_node(tmp_path) as (node, plugin):
        gate = await a_call_is_held(node, plugin)
        await node.runs("new")

        plugin.script.refusals.append(GRPCError(Status.FAILED_PRECONDITION, "not now"))
        gate.set()

        await node.until_restarted("u1")
        waiting = [event.text for event in node.model.history.of("container_waiting")]
        assert ["not now"] == waiting, "the plugin's words alone"
        assert [] == node.model.history.of("panicked")
        assert [1, 1] == [len((await node.held(name) or {})["main"]) for name in ("u1", "new")]


# PodResources: how often it may be asked.


async def test_the_rate_limit_is_a_burst_of_ten_then_a_hundred_a_second(tmp_path):
    async with a_node(tmp_path) as (node, _), node.resources.lister() as lister:

        async def answered(times: int) -> int:
            refused = list[tuple[Status, str | None]]()
            for _ in range(times):
                try:
                    await lister.list(ListPodResourcesRequest())
                except GRPCError as error:
                    refused.append((error.status, error.message))
            assert {(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")} >= {*refused}
            return times - len(refused)

        for seconds, count in ((10, 10), (0.0501, 5), (10, 10)):
            await asyncio.sleep(seconds)
            assert count == await answered(30)


# The Node object as the kubelet model keeps it.


async def test_the_node_follows_at_ticks_of_ten_seconds(tmp_path):
    async with a_node(tmp_path) as (node, plugin):
        await node.until_counted(4, 4)
        begun = now()
        plugin.publish(devices(2))
        await node.until_listed(2)
        await asyncio.sleep(5)
        assert ("4", "4") == node.counted()
        await node.until_counted(2, 2)
        assert 10 == round(now() - begun)

        plugin.end_streams()
        await node.until_counted(2, 0)
        await node.until(lambda: node.counted() == ("0", "0"), "the resource stays", FOREVER)
        assert 300 < now() - begun < 340
