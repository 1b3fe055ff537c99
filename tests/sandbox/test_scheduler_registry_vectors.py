"""When a register annotation is read again, against what HAMi v2.10's own code answered."""

import datetime as dt
import re
from typing import Any

import pytest

from agent.sandbox.scheduler.registry import NodeSighting, Registry, check_node
from tests.fakes.clock import START
from tests.fakes.scheduler_vectors import load_cases

CASES = load_cases("check_health")
STAMP = "%Y-%m-%d %H:%M:%S"


def resolve(handshake: str) -> str:
    """Fill in `<now-1m30s>`."""

    def fill(found: re.Match[str]) -> str:
        ago = dt.timedelta(minutes=int(found[1] or 0), seconds=int(found[2]))
        return (START - ago).strftime(STAMP)

    return re.sub(r"<now-?(?:(\d+)m)?(\d+)s>", fill, handshake)


def a_node(handshake: str, register: str, allocatable: str) -> dict[str, Any]:
    annotations = {"hami.io/node-nvidia-register": register}
    if handshake:
        annotations["hami.io/node-handshake"] = handshake
    return {
        "metadata": {"name": "n1", "annotations": annotations},
        "status": {"allocatable": {"nvidia.com/gpu": allocatable}},
    }


@pytest.mark.parametrize("case_id", sorted(CASES))
def test_a_node_is_judged_as_by_hami(case_id: str) -> None:
    seen = NodeSighting()
    for step in CASES[case_id]["steps"]:
        node = a_node(resolve(step["handshake"]), step["register"], step["allocatable"])

        checkup = check_node(seen, node, START)

        assert step["healthy"] == checkup.healthy
        assert step["needUpdate"] == checkup.refresh
        assert step["scheduler_wrote_Requesting"] == checkup.asks


GPU = '[{"id":"GPU-aaaa","count":10,"devmem":16384,"devcore":100,"type":"NVIDIA-Tesla T4"%s}]'
HEALTHY = GPU % ',"health":true'
RECENT = START.strftime(f"Requesting_{STAMP}")


def offered(registry: Registry) -> str:
    """The vector's words for what a filter would say of the only GPU."""
    state = registry.state("n1", {})
    if state is None:
        return "node unregistered"
    if not state.gpus[0].capacity.healthy:
        return "1/1 CardNotHealth"
    return "1/1 CardCordoned" if "GPU-aaaa" in state.cordoned else ""


def test_the_steps_of_one_node_lead_where_hami_leads() -> None:
    registry = Registry()
    cordoned = a_node(RECENT, HEALTHY, "10")
    cordoned["metadata"]["annotations"]["hami.io/device-cordon"] = "GPU-aaaa"
    unasked = a_node("Reported_x", HEALTHY, "10")
    unasked["metadata"]["annotations"]["hami.io/device-cordon"] = "GPU-aaaa"
    nodes = (
        a_node(RECENT, HEALTHY, "10"),
        cordoned,
        unasked,
        a_node(RECENT, HEALTHY, "10"),
        a_node(RECENT, "{", "10"),
        a_node(RECENT, GPU % "", "10"),
        a_node(RECENT, GPU % "", "0"),
        a_node(RECENT, HEALTHY, "10"),
    )
    steps = load_cases("registration_steps")["C1"]["steps"]

    for node, step in zip(nodes, steps, strict=True):
        registry.ingest(node, START)

        expected = (step["FailedNodes"] or {}).get("n1", "")
        assert expected == offered(registry), step["step"]


def test_an_equal_annotation_is_no_change() -> None:
    registry = Registry()
    registry.ingest(a_node("Reported_x", HEALTHY, "10"), START)
    registry.ingest(a_node("Reported_x", HEALTHY, "10"), START)

    assert 1 == registry.changes
