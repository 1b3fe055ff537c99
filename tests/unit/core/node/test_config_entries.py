"""Names of Nodes in settings: which match nothing, and which are misspelt."""

import pytest

from agent.node.scheduling import NamedNode, is_alike, judge_entries

NODE = "gpu-a07.example.org"
THERE, MISSING, UNSEEN = NamedNode.THERE, NamedNode.MISSING, NamedNode.UNSEEN


def judged(**names: NamedNode) -> list[str]:
    found = list(judge_entries(NODE, {key.replace("_", "-"): v for key, v in names.items()}, "f"))
    return [f"{one.verdict.value}: {one.said}" for one in found]


def test_without_names_there_is_nothing_to_say():
    assert ["ok: no entry names a Node"] == judged()


def test_a_name_of_no_node_is_a_note():
    said = "note: an entry for your-node-name matches no Node"

    assert [said] == judged(your_node_name=MISSING, gpu_b=THERE)


def test_a_name_that_was_not_looked_up_is_no_fault():
    assert ["ok: 2 Nodes named; whether 1 of them exist was not asked"] == judged(
        other=UNSEEN, gpu_b=THERE
    )
    assert ["ok: 1 Node named; each exists"] == judged(gpu_b=THERE)


def test_a_name_that_resembles_this_nodes_is_asked_about():
    unseen = "note: an entry for gpu-a07 does not match this Node; did you mean"

    assert [f"{unseen} {NODE}?"] == judged(gpu_a07=UNSEEN)
    assert ["matches no Node; did you mean" in one for one in judged(gpu_a07=MISSING)] == [True]


def test_if_this_node_is_named_no_other_name_is_meant_for_it():
    names = {NODE: THERE, "gpu-a07": UNSEEN}
    (found,) = judge_entries(NODE, names, "f")

    assert "ok" == found.verdict.value


@pytest.mark.parametrize(
    ("name", "node", "alike"),
    [
        ("gpu-a07", "gpu-a07.example.org", True),
        ("GPU-A07", "gpu-a07", True),
        ("gpu-ao7", "gpu-a07", True),
        ("gpu-a08", "gpu-a07", False),
        ("your-node-name", "gpu-a07", False),
    ],
)
def test_the_next_node_of_a_pool_is_no_misspelling(name, node, alike):
    assert alike is is_alike(name, node)
