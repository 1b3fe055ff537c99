"""What a watch has told: since when an object is in a state, and what was before a test."""

import pytest

from tests.peers.lab.api import Sighting, Watched


def seen(at: float, phase: str, kind: str = "MODIFIED") -> Sighting:
    metadata = {"namespace": "default", "name": "pod"}
    return Sighting(at, kind, {"metadata": metadata, "status": {"phase": phase}})


def runs(pod) -> bool:
    return pod["status"]["phase"] == "Running"


@pytest.fixture
def watched() -> Watched:
    """Two pods of one name, one after the other."""
    watched = Watched()
    for sighting in (
        seen(1.0, "Pending", "ADDED"),
        seen(2.0, "Running"),
        seen(3.0, "Running", "DELETED"),
        seen(4.0, "Pending", "ADDED"),
        seen(5.0, "Running"),
        seen(6.0, "Running"),
    ):
        watched.take(sighting)
    return watched


def test_the_first_sighting_counts(watched):
    assert 2.0 == watched.when("default/pod", runs)


def test_the_first_sighting_since_a_moment_counts(watched):
    assert 5.0 == watched.when("default/pod", runs, since=3.5)
    assert 5.0 == watched.when("default/pod", runs, since=5.0)
    assert None is watched.when("default/pod", runs, since=6.5)


def test_what_was_forgotten_was_never_seen_and_still_is(watched):
    watched.forget()
    assert None is watched.when("default/pod", runs)
    assert runs(watched.objects["default/pod"])
