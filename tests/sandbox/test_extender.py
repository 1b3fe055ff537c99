"""filter and bind as kube-scheduler calls them, over a cluster that is a real HTTP server."""

import asyncio
from pathlib import Path

import pytest

from agent.sandbox.api_errors import Json
from agent.sandbox.extender.service import ExtenderOptions
from agent.sandbox.scheduler.model import SchedulerSettings
from tests.fakes.clock import START
from tests.fakes.extender_rig import ExtenderRig, a_cluster, extended
from tests.fakes.scheduler_cluster import LOCK, register_of

pytestmark = pytest.mark.looptime(False)

SECONDS = str(int(START.timestamp()))
RESULT = {
    "Nodes": None,
    "NodeNames": None,
    "FailedNodes": None,
    "FailedAndUnresolvableNodes": None,
    "Error": "",
}


async def test_a_pod_is_given_its_node_and_the_answer_has_the_names_of_go(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        rig.create_pod("p")

        assert RESULT | {"NodeNames": ["n1"]} == await rig.filter("p")

        assert {
            "hami.io/vgpu-node": "n1",
            "hami.io/vgpu-time": SECONDS,
            "hami.io/vgpu-devices-to-allocate": "GPU-a,NVIDIA,1000,0:;",
            "hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,1000,0:;",
        } == rig.marks("p")
        assert {"hami.io/vgpu-node": "n1"} == rig.pod("p")["metadata"]["labels"]
        await rig.until_told("p", "FilteringSucceed")


async def test_a_pod_is_bound_under_the_lock_of_its_node(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        rig.create_pod("p")
        await rig.filter("p")

        assert "" == await rig.bind("p")

        assert "n1" == rig.pod("p")["spec"]["nodeName"]
        assert f"{START:%Y-%m-%dT%H:%M:%SZ},default,p" == rig.node()[LOCK]
        assert "allocating" == rig.marks("p")["hami.io/bind-phase"]
        assert SECONDS == rig.marks("p")["hami.io/bind-time"]
        await rig.until_told("p", "FilteringSucceed", "BindingSucceed")


async def test_names_are_read_in_any_case(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        pod = rig.create_pod("p")
        args = {"pod": pod, "nodenames": ["n1"]}

        assert (200, RESULT | {"NodeNames": ["n1"]}) == await rig.post("/filter", args)
        names = {"podName": "p", "podNamespace": "default", "podUID": pod["metadata"]["uid"]}
        assert (200, {"Error": ""}) == await rig.post("/bind", names | {"node": "n1"})


async def test_a_node_that_another_pod_has_locked_is_contended(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        for name in ("p1", "p2"):
            rig.create_pod(name)
            await rig.filter(name)
        await rig.bind("p1")

        expected = "node n1 has been locked within 5m0s: node lock contention"
        assert expected == await rig.bind("p2")

        assert rig.node()[LOCK].endswith(",default,p1")
        assert "nodeName" not in rig.pod("p2")["spec"]
        await rig.until_told("p2", "FilteringSucceed", "BindingFailed")


async def test_of_many_bindings_at_once_one_takes_the_lock(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        names = [f"p{number}" for number in range(6)]
        for name in names:
            rig.create_pod(name)
            await rig.filter(name)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(rig.bind(name)) for name in names]
        errors = {name: task.result() for name, task in zip(names, tasks, strict=True)}

        (bound,) = [name for name, error in errors.items() if not error]
        assert rig.node()[LOCK].endswith(f",default,{bound}")
        assert [bound] == [name for name in names if "nodeName" in rig.pod(name)["spec"]]
        assert all("contention" in error for error in errors.values() if error)


async def test_a_binding_that_fails_gives_the_lock_back(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        rig.create_pod("p")
        await rig.filter("p")
        rig.store.update("pods", "default", "p", being_deleted)

        assert "pod p is being deleted" in await rig.bind("p")

        assert "allocating" == rig.marks("p")["hami.io/bind-phase"]
        assert LOCK not in rig.node()
        await rig.until_told("p", "FilteringSucceed", "BindingFailed")


@pytest.mark.parametrize(("pod", "node"), [("p", "n7"), ("gone", "n1")])
async def test_what_is_not_there_is_not_bound(tmp_path: Path, pod: str, node: str) -> None:
    async with extended(tmp_path) as rig:
        rig.create_pod("p")
        await rig.until_fits("p")
        await rig.bind("p")  # its pods are seen
        args = {"PodName": pod, "PodNamespace": "default", "PodUID": "u", "Node": node}

        _, answer = await rig.post("/bind", args)

        missing = 'node "n7" not found' if pod == "p" else 'pod "gone" not found'
        assert {"Error": missing} == answer


async def test_a_cluster_that_does_not_answer_is_the_error_of_both_verbs(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        rig.create_pod("big", memory_mib=12000)
        rig.create_pod("first")
        await rig.filter("first")
        await rig.api.begin_outage()

        assert "no answer from the API server" in (await rig.filter("big"))["Error"]
        assert "no answer from the API server" in await rig.bind("big")


async def test_a_placement_that_could_not_be_written_is_not_counted(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        gone = rig.create_pod("gone", memory_mib=12000)
        rig.create_pod("p", memory_mib=12000)
        rig.store.delete("pods", "default", "gone", grace=0)

        _, answer = await rig.post("/filter", {"Pod": gone, "NodeNames": ["n1"]})

        assert 'pods "gone" not found' in answer["Error"]
        assert ["n1"] == (await rig.filter("p"))["NodeNames"]


async def test_pods_that_are_filtered_at_the_same_time_count_each_other(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        for name in ("p1", "p2", "p3"):
            rig.create_pod(name, memory_mib=12000)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(rig.filter(name)) for name in ("p1", "p2", "p3")]
        answers = [task.result() for task in tasks]

        assert 1 == sum(answer["NodeNames"] == ["n1"] for answer in answers)
        refused = RESULT | {"FailedNodes": {"n1": "1/1 CardInsufficientMemory"}}
        assert 2 == sum(answer == refused for answer in answers)


async def test_a_pod_that_is_filtered_again_counts_once(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        rig.create_pod("p", memory_mib=12000)

        for _ in range(3):
            assert ["n1"] == (await rig.filter("p"))["NodeNames"]


async def test_a_pod_without_a_gpu_may_go_anywhere(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        rig.store.create("pods", {"metadata": {"name": "p"}, "spec": {"containers": []}})

        assert ["n1", "n7"] == (await rig.filter("p", "n1", "n7"))["NodeNames"]
        assert {} == rig.marks("p")


async def test_a_node_without_a_registration_fails_by_name(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        rig.create_pod("p")

        answer = await rig.filter("p", "n7")

        assert RESULT | {"FailedNodes": {"n7": "node unregistered"}} == answer
        await rig.until_told("p", "FilteringFailed")


async def test_whole_nodes_are_only_simulated(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        rig.create_pod("used", memory_mib=16000)
        await rig.filter("used")
        await rig.until_told("used", "FilteringSucceed")
        node, pod = rig.store.get("nodes", "", "n1"), rig.create_pod("p", memory_mib=16000)
        bare = {"metadata": {"name": "n2"}}
        version = rig.store.version

        _, answer = await rig.post("/filter", {"Pod": pod, "Nodes": {"items": [bare, node]}})
        _, none = await rig.post("/filter", {"Pod": pod, "Nodes": {"items": None}})

        assert [node] == answer["Nodes"]["items"]
        assert {"n2": "node unregistered"} == answer["FailedNodes"]
        assert (None, {}) == (none["Nodes"], none["FailedNodes"])
        assert version == rig.store.version


async def test_a_call_without_a_pod_is_told_so(tmp_path: Path) -> None:
    async with extended(tmp_path) as rig:
        answer = await rig.post("/filter", {"Pod": None, "NodeNames": ["n1"]})

        assert (200, RESULT | {"Error": "extender args missing pod"}) == answer


async def test_a_call_before_the_cluster_was_listed_waits_for_it(tmp_path: Path) -> None:
    async with a_cluster(tmp_path) as rig:
        rig.create_pod("p")
        await rig.api.begin_outage()
        async with rig.extending(), asyncio.TaskGroup() as group:
            asked = group.create_task(rig.filter("p"))
            await asyncio.wait([asked], timeout=0.1)
            assert not asked.done()
            await rig.api.end_outage()

        assert ["n1"] == asked.result()["NodeNames"]


async def test_the_policies_and_the_lock_timeout_are_the_settings(tmp_path: Path) -> None:
    settings = SchedulerSettings(gpu_policy="binpack", lock_timeout=60).quick()
    async with extended(tmp_path, ExtenderOptions(settings)) as rig:
        rig.annotate_node(register=register_of("GPU-a", "GPU-b"))
        for name in ("p1", "p2"):
            rig.create_pod(name)
        await until_seen(rig)
        await rig.filter("p1")
        await rig.filter("p2")

        assert 1 == len(
            {rig.marks(name)["hami.io/vgpu-devices-allocated"] for name in ("p1", "p2")}
        )
        await rig.bind("p1")
        assert "locked within 1m0s" in await rig.bind("p2")
        rig.clock.advance(61)
        assert "" == await rig.bind("p2")


def being_deleted(pod: Json) -> Json:
    pod["metadata"]["deletionTimestamp"] = f"{START:%Y-%m-%dT%H:%M:%SZ}"
    return pod


async def until_seen(rig: ExtenderRig) -> None:
    """The extender knows of the second GPU."""
    probe = rig.create_pod("probe", memory_mib=1)
    async with asyncio.timeout(30):
        while "GPU-b" not in rig.marks("probe").get("hami.io/vgpu-devices-allocated", ""):
            await rig.filter("probe")
    rig.store.delete("pods", "default", probe["metadata"]["name"], grace=0)
