"""What each version of HAMi's scheduler takes from a Node, and when it looks again."""

import datetime as dt
from typing import Any

import pytest

from agent.sandbox.scheduler.registry import NodeSighting, Registry, Version, check_node, decode
from tests.fakes.clock import START
from tests.hami_vectors import Vector, cases, vectors

HANDSHAKE = "hami.io/node-handshake"
REGISTER = "hami.io/node-nvidia-register"
JSON = '[{"id":"GPU-a","count":10%s}]'
HEALTHY, ILL = JSON % ',"health":true', JSON % ""
COLON = "GPU-a,10,1,100,NVIDIA-T4,0,%s,0,hami-core:"
SEVEN = "GPU-a,10,1,100,NVIDIA-T4,0,%s:"
SECOND = dt.timedelta(seconds=1)
LATER = (Version.V2_8, Version.V2_9, Version.V2_10)
EARLIER = (Version.V2_4, Version.V2_7)


def a_node(register: str, handshake: str = "", allocatable: str = "10") -> dict[str, Any]:
    annotations = {REGISTER: register, HANDSHAKE: handshake}
    return {
        "metadata": {"name": "n1", "annotations": {k: v for k, v in annotations.items() if v}},
        "status": {"allocatable": {"nvidia.com/gpu": allocatable}},
    }


def stamped(word: str, seconds_ago: int) -> str:
    return f"{word}_{START - seconds_ago * SECOND:%Y-%m-%d %H:%M:%S}"


def text_for(version: Version, *, healthy: bool = True) -> str:
    if version.reads_json:
        return HEALTHY if healthy else ILL
    return (SEVEN if version is Version.V2_4 else COLON) % ("true" if healthy else "false")


def offered(registry: Registry) -> bool | None:
    """Whether the node's GPU is offered as healthy; None: the node is not in the cache."""
    state = registry.state("n1", {})
    return None if state is None else state.gpus[0].capacity.healthy


@pytest.mark.parametrize("vector", cases("handshake_check"), ids=str)
def test_the_shared_rule_is_hamis(vector: Vector) -> None:
    text = vector.given["handshake"].replace("<now>", f"{START:%Y-%m-%d %H:%M:%S}")
    allocatable = vector.given["allocatable"]
    seen = NodeSighting(int(allocatable), HEALTHY)

    found = check_node(seen, a_node(HEALTHY, text, allocatable), START)

    assert vector.expected["healthy"] is found.healthy
    assert vector.expected["needUpdate"] is found.refresh
    assert vector.expected["handshakeAfter"].startswith("Requesting_<now") is found.asks


def test_a_node_over_time_is_judged_as_by_hami() -> None:
    (vector,) = vectors("scheduler_health_sequence").values()
    seen = NodeSighting()

    for step in vector.expected:
        node = a_node(step["register"], step["handshake"], step["allocatable"])
        found = check_node(seen, node, START)
        gpus = decode(step["register"], Version.V2_10)

        assert step["healthy"] is found.healthy, step["step"]
        assert step["needUpdate"] is found.refresh, step["step"]
        assert step["decodedDevices"] == len(gpus or ()), step["step"]


@pytest.mark.parametrize("version", Version)
def test_each_version_reads_its_own_form_and_no_other(version: Version) -> None:
    texts = {HEALTHY, COLON % "true", SEVEN % "true"}
    read = {text for text in texts if decode(text, version) is not None}

    if version.reads_json:
        assert {HEALTHY} == read
    else:
        assert {SEVEN % "true"} | ({COLON % "true"} if version is Version.V2_7 else set()) == read


@pytest.mark.parametrize("version", EARLIER)
def test_up_to_2_7_1_every_stamp_is_a_reason_to_read(version: Version) -> None:
    registry = Registry(version)

    writes = registry.ingest(a_node(text_for(version), "Reported x"), START)
    assert {HANDSHAKE: stamped("Requesting", 0)} == writes
    registry.ingest(a_node(text_for(version, healthy=False), stamped("Requesting", 0)), START)
    assert offered(registry)
    registry.ingest(a_node(text_for(version, healthy=False), "Reported y"), START)
    assert offered(registry) is False


@pytest.mark.parametrize("version", EARLIER)
def test_up_to_2_7_1_a_minute_of_silence_drops_the_node_until_it_speaks(version: Version) -> None:
    registry = Registry(version)
    text = text_for(version)
    registry.ingest(a_node(text, "Reported x"), START)

    assert {} == registry.ingest(a_node(text, stamped("Requesting", 59)), START)
    assert {HANDSHAKE: stamped("Deleted", 0)} == registry.ingest(
        a_node(text, stamped("Requesting", 60)), START
    )
    assert offered(registry) is None
    registry.ingest(a_node(text, stamped("Deleted", 600)), START)
    assert offered(registry) is None
    registry.ingest(a_node(text, "Reported y"), START)
    assert offered(registry)


def test_2_8_reads_again_when_the_count_changed_and_for_no_other_reason() -> None:
    registry = Registry(Version.V2_8)
    registry.ingest(a_node(HEALTHY), START)

    assert {} == registry.ingest(a_node(ILL, "Reported x"), START)
    assert offered(registry)
    registry.ingest(a_node(ILL, "Reported x", "9"), START)
    assert offered(registry) is False


def test_2_9_reads_again_when_the_handshake_is_gone_but_not_for_the_text() -> None:
    registry = Registry(Version.V2_9)
    registry.ingest(a_node(HEALTHY), START)

    assert {} == registry.ingest(a_node(ILL, stamped("Requesting", 600)), START)
    assert offered(registry)
    assert {HANDSHAKE: stamped("Requesting", 0)} == registry.ingest(a_node(ILL), START)
    assert offered(registry) is False


@pytest.mark.parametrize(("age", "read"), [(59, False), (60, True)])
def test_2_9_takes_a_dropped_node_back_after_a_minute(age: int, *, read: bool) -> None:
    registry = Registry(Version.V2_9)
    registry.ingest(a_node(HEALTHY), START)

    registry.ingest(a_node(ILL, stamped("Deleted", age)), START)

    assert (offered(registry) is False) is read


def test_2_10_reads_a_changed_text() -> None:
    registry = Registry(Version.V2_10)
    registry.ingest(a_node(HEALTHY), START)

    registry.ingest(a_node(ILL, stamped("Requesting", 600)), START)

    assert offered(registry) is False


@pytest.mark.parametrize("version", LATER)
def test_a_node_without_slices_is_dropped_and_marked_as_the_version_does(version: Version) -> None:
    registry = Registry(version)
    registry.ingest(a_node(HEALTHY, stamped("Requesting", 0)), START)
    assert offered(registry)

    writes = registry.ingest(a_node(HEALTHY, stamped("Requesting", 0), "0"), START)

    mark = None if version is Version.V2_10 else stamped("Deleted", 0)
    assert {HANDSHAKE: mark} == writes
    assert offered(registry) is None


def test_2_10_cleans_up_nothing_where_it_knows_nothing() -> None:
    gone = a_node(HEALTHY, stamped("Requesting", 600), "0")

    assert {} == Registry(Version.V2_10).ingest(gone, START)


@pytest.mark.parametrize("version", Version)
def test_a_text_that_is_not_read_leaves_what_was_on_offer(version: Version) -> None:
    registry = Registry(version)
    registry.ingest(a_node(text_for(version), "Reported x"), START)

    registry.ingest(a_node("no annotation", "Reported y", "9"), START)

    assert offered(registry)
