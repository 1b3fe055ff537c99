"""The checks beside a running agent with real pynvml over the C stub, and files of our own."""

from pathlib import Path

import pytest

from agent.cli.doctor import NodeSeen, examine
from agent.host.process import SystemClock
from agent.node.findings import ALL_GROUPS, CheckGroup
from agent.node.scheduling import AgentAnswer
from agent.settings.schema import Settings
from agent.settings.sources import NodeFacts, Sources
from agent.settings.values import make_plan

pytestmark = [pytest.mark.looptime(False), pytest.mark.usefixtures("forgetful")]

READY = AgentAnswer("/run/api.sock", 200, "[+]state ok\nreadyz check passed\n")


@pytest.fixture
def settings(tmp_path: Path, stub_path: Path) -> Settings:
    """A node in plain mode with the GPUs of the stub."""
    (tmp_path / "hook").mkdir(mode=0o755)
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc").mkdir()
    flags = {
        "--scheduler": "none",
        "--nvml-library": str(stub_path),
        "--kubelet-socket": str(tmp_path / "plugins/kubelet.sock"),
        "--pod-resources-socket": str(tmp_path / "resources.sock"),
        "--hook-path": str(tmp_path / "hook"),
        "--state-dir": str(tmp_path / "state"),
        "--run-dir": str(tmp_path / "run"),
    }
    return make_plan(Sources(flags=flags, host="host")).settings(NodeFacts())


async def examined(settings: Settings, path: Path, *groups: CheckGroup) -> list[tuple[str, str]]:
    seen = NodeSeen(
        settings,
        {},
        SystemClock(),
        frozenset(groups) or ALL_GROUPS,
        READY,
        device_files=path / "dev",
        processes=path / "proc",
    )
    found = await examine(seen)
    return [(one.point.value, one.verdict.value) for one in found]


def remove(path: Path) -> None:
    path.unlink()


async def test_the_device_files_are_held_against_the_gpus_of_the_driver(
    settings, stub, tmp_path: Path
):
    stub.order([0, 1, 3])
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"):
        (tmp_path / "dev" / name).touch()
    fewer = await examined(settings, tmp_path, CheckGroup.DRIVER)
    (tmp_path / "dev/nvidia2").touch()
    all_three = await examined(settings, tmp_path, CheckGroup.DRIVER)
    (tmp_path / "dev/nvidia-uvm").unlink()
    without = await examined(settings, tmp_path, CheckGroup.DRIVER)

    assert [("P-DRIVER", "ok"), ("P-ACCESS", "note")] == fewer
    assert [("P-DRIVER", "ok"), ("P-ACCESS", "ok")] == all_three
    assert [("P-DRIVER", "ok"), ("P-ACCESS", "WRONG")] == without


async def test_without_a_driver_missing_device_files_are_its_consequence(
    settings, stub_path: Path, tmp_path: Path
):
    remove(stub_path)

    found = await examined(settings, tmp_path, CheckGroup.DRIVER)

    assert [("P-DRIVER", "WRONG"), ("P-ACCESS", "note"), ("P-ACCESS", "note")] == found


async def test_in_plain_mode_no_api_server_is_asked_and_none_is_missed(
    settings, stub, tmp_path: Path
):
    stub.order([0])
    found = await examined(settings, tmp_path)

    assert set() == {"P-NODE", "P-RIGHTS", "P-OFFER", "P-REPORT"} & {point for point, _ in found}
    assert "unknown" not in {verdict for _, verdict in found}
    assert ("P-AGENT", "ok") in found
    assert ("P-KUBELET", "WRONG") in found
    assert ("P-WITNESS", "note") in found, "it follows from the kubelet"


async def test_the_largest_container_directories_are_named(settings, tmp_path: Path):
    containers = tmp_path / "hook/vgpu/containers"
    uid = "6f1c1f0e-8f5a-4a52-9d2e-6b8b8a1d000"
    for number, entries in enumerate((2, 10_001, 10_500, 11_000, 12_000)):
        leaf = containers / f"{uid}{number}_main"
        leaf.mkdir(parents=True)
        for entry in range(entries):
            (leaf / f"{entry}").touch()

    found = await examined(settings, tmp_path, CheckGroup.PATHS)

    assert 3 == found.count(("P-PATHS", "note"))
