"""When a container directory is large, whose it is, and what is said of it."""

import msgspec
import pytest

from agent.core.cluster.pods import PodUid
from agent.core.reconcile.measuring import (
    DirectorySize,
    OwnedDirectory,
    large_event,
    owned_directories,
)
from agent.core.state.ledger import Holder, Ledger
from tests.builders import POD_UID, a_row
from tests.unit.core.allocation.plain_scene import a_plain_row

MIB = 2**20
OWNED = OwnedDirectory(f"{POD_UID}_main", "main", "team-a", "train-0", PodUid(POD_UID))


@pytest.mark.parametrize(
    ("size", "is_large"),
    [
        (DirectorySize(), False),
        (DirectorySize(allocated=2 * MIB, entries=3), False),
        (DirectorySize(allocated=256 * MIB, entries=10_000), False),
        (DirectorySize(allocated=256 * MIB + 512), True),
        (DirectorySize(entries=10_001), True),
        (DirectorySize(closed=1), True),
        (DirectorySize(is_deep=True), True),
    ],
)
def test_more_than_hami_core_can_need_is_large_and_what_cannot_be_told_too(size, is_large):
    assert is_large == size.is_large


def test_it_is_said_on_the_pod_who_keeps_how_much_and_what_to_do():
    event = large_event(OWNED, DirectorySize(allocated=300 * MIB, entries=12))

    assert ("DirectoryLarge", True) == (event.reason, event.warning)
    assert ("team-a", "train-0", POD_UID) == (event.namespace, event.pod, event.pod_uid)
    assert event.text.startswith("Container main keeps at least 300 MiB in 12 entries in its")
    for part in ("256 MiB or 10,000 entries", "HA-5003", "delete the pod"):
        assert part in event.text


@pytest.mark.parametrize(
    ("size", "part"),
    [
        (
            DirectorySize(entries=1, closed=1),
            "1 entry and a directory that the agent may not look into in",
        ),
        (
            DirectorySize(entries=9, closed=1_234),
            "and 1,234 directories that the agent may not look into",
        ),
        (DirectorySize(entries=16, is_deep=True), "and more than 16 directories in each other in"),
        (DirectorySize(entries=10_001), "keeps at least 0 MiB in 10,001 entries in its directory"),
    ],
)
def test_what_is_told_is_what_was_seen(size, part):
    assert part in large_event(OWNED, size).text


def test_of_a_pod_whose_uid_is_not_known_it_is_said_on_the_node():
    named = large_event(msgspec.structs.replace(OWNED, pod_uid=PodUid("")), DirectorySize(closed=1))
    unnamed = large_event(OwnedDirectory("uid_container"), DirectorySize(closed=1))

    assert ("", "", "") == (named.namespace, named.pod, named.pod_uid)
    assert named.text.startswith("Container main of pod team-a/train-0 keeps ")
    assert unnamed.text.startswith("A container that the kubelet has not named (uid_container) ")


def test_each_row_with_a_directory_has_an_owner_as_far_as_one_is_known():
    holder = Holder("team-b", "infer", "app")
    plain = (
        a_plain_row(holder=holder),
        a_plain_row(uid=PodUid("b" * 32)),
        a_plain_row(uid=PodUid("c" * 32), holder=holder, limited=False),
    )
    row = a_row()

    found = tuple(owned_directories(Ledger((row, *plain))))

    assert (
        OwnedDirectory(
            f"{row.key.pod_uid}_{row.key.container}",
            row.key.container,
            row.namespace,
            row.pod,
            row.key.pod_uid,
        ),
        OwnedDirectory(found[1].name, "app", "team-b", "infer"),
        OwnedDirectory(found[2].name),
    ) == found
    assert {plain[0].key.pod_uid, plain[1].key.pod_uid} == {
        one.name.partition("_")[0] for one in found[1:]
    }
