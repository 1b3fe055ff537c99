"""A real agent offers no slice that no container could use, or that would have no limits."""

import json

import pytest

from agent.cluster import HANDSHAKE, REGISTER
from agent.hami.register import decode_register
from agent.sandbox.lab.cluster import LabOptions, SandboxCluster, open_cluster
from agent.sandbox.lab.web import fetch
from agent.sandbox.scenario.facts import is_running
from agent.sandbox.scenario.workloads import Wish, Workload
from tests.process.agent_process import PATIENCE, offers, options, started
from tests.process.doctored_node import doctored

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(120)]


def specification(*gpus: str) -> str:
    devices = [{"name": gpu, "containerEdits": {"env": ["A=1"]}} for gpu in gpus]
    return json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices})


def told(cluster: SandboxCluster, reason: str) -> list[str]:
    events = cluster.store.select("events")
    return [one["message"] for one in events if one["reason"] == reason]


def of(findings: list[dict], point: str) -> dict:
    (found,) = [one for one in findings if one["id"] == point]
    return found


def healthy(cluster: SandboxCluster) -> list[bool]:
    """The health of the GPUs in the report, once a scheduler has read it; else nothing."""
    annotations = cluster.node_annotations()
    if not {REGISTER, HANDSHAKE} <= annotations.keys():
        return []
    return [gpu.healthy for gpu in decode_register(annotations[REGISTER])]


def wrong(findings: list[dict]) -> list[str]:
    return [one["id"] for one in findings if one["verdict"] == "wrong"]


def with_cdi(strategy: str) -> LabOptions:
    return options(f"--device-list-strategy={strategy}", gpus=2)


async def test_gpus_are_on_offer_as_far_as_cdi_specifications_define_them():
    async with open_cluster(with_cdi("cdi-annotations")) as cluster:
        static, dynamic = (cluster.places.root / name for name in ("cdi", "run-cdi"))
        flag = f"--cdi-spec-dirs={static},{dynamic}"
        cluster.places.config.write_text(f"allocation: {{cdiSpecDirs: ['{static}', '{dynamic}']}}")
        await cluster.start_agent()
        assert await cluster.until(lambda: len(told(cluster, "GpuLeftOut")) == 2, PATIENCE)
        assert await cluster.until(lambda: healthy(cluster) == [False, False], PATIENCE)
        gpus = [gpu.uuid for gpu in decode_register(cluster.node_annotations()[REGISTER])]
        code, findings = await doctored(cluster, flag, "--only", "driver,agent,kubelet")
        assert (1, ["P-CDI"]) == (code, wrong(findings))
        said = of(findings, "P-CDI")["said"]
        assert f"nvidia.com/gpu={gpus[0]} and nvidia.com/gpu={gpus[1]}" in said

        dynamic.mkdir()
        (dynamic / "nvidia.yaml").write_text(specification(gpus[0]))
        assert await offers(cluster, 10)
        assert await cluster.until(lambda: healthy(cluster) == [True, False], PATIENCE)
        cluster.submit(Workload("first", "", (Wish("main", 1, 1024),)).pod())
        assert await cluster.until(lambda: is_running(cluster, "first"), PATIENCE)
        static.mkdir()
        (static / "more.json").write_text(specification(gpus[1]))
        assert await offers(cluster, 20)
        code, findings = await doctored(cluster, flag, "--only", "driver")
        assert (0, []) == (code, wrong(findings))
        assert "defines 2 GPUs" in of(findings, "P-CDI")["said"]

        (dynamic / "nvidia.yaml").unlink()
        assert await offers(cluster, 10)
        page = await fetch(cluster.web_address or "", "/readyz?verbose")
        assert f"defines nvidia.com/gpu={gpus[0]}; write one" in page.text
        assert is_running(cluster, "first")


async def test_slices_are_on_offer_while_containers_would_load_the_library():
    async with open_cluster(options(gpus=1)) as cluster:
        await started(cluster, slices=10)
        file = cluster.places.hook / "vgpu" / "ld.so.preload"
        good = file.read_text()
        assert f"{cluster.places.hook}/vgpu/libvgpu.so\n" == good

        file.write_text("/usr/local/vgpu/libvgpu.so\n")
        assert await offers(cluster, 0)
        assert await cluster.until(lambda: told(cluster, "NothingOffered") != [], PATIENCE)
        code, findings = await doctored(cluster, "--only", "library")
        assert (1, ["P-PRELOAD"]) == (code, wrong(findings))
        assert f"make {good.strip()} its only line" in of(findings, "P-PRELOAD")["advice"]
        file.write_text(f"# a comment\n/usr/lib/other.so:{good}")
        assert await offers(cluster, 10)
        (file.parent / "libvgpu.so").write_bytes(b"")
        assert await offers(cluster, 0)
        unloadable = "empty or no library for this machine"
        assert await cluster.until(
            lambda: unloadable in str(told(cluster, "NothingOffered")), PATIENCE
        )
