"""HAMi's node config against what HAMi v2.10 makes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import MalformedText
from agent.settings.hami import decode_nodeconfig
from tests.builders import G1
from tests.hami_vectors import Vector, cases, vectors

ABSENT = "nodeconfig-095"
WORDS = {
    "devicesplitcount": "deviceSplitCount",
    "devicememoryscaling": "deviceMemoryScaling",
    "devicecorescaling": "deviceCoreScaling",
    "libcudaloglevel": "libCudaLogLevel",
    "enablenumatopology": "enableNumaTopology",
}


@pytest.mark.parametrize("vector", cases("nodeconfig", without={ABSENT: "no file"}), ids=str)
def test_a_text_is_read_or_refused_whole_as_hami_does(vector: Vector):
    text = vector.given["config.json"]
    if vector.expected["error"] is not None:
        with pytest.raises(MalformedText):
            decode_nodeconfig(text)
        return
    for entry in decode_nodeconfig(text):
        overrides = {WORDS[key]: value for key, value in entry.items() if key in WORDS and value}
        if entry["name"] == vector.given["NODE_NAME"] and "two entries" not in vector.name:
            assert overrides.items() <= vector.expected["resolved"].items()


def test_every_key_is_read_under_its_name():
    (entry,) = decode_nodeconfig(vectors("nodeconfig")["nodeconfig-085"].given["config.json"])
    assert {
        "name": "node-a",
        "operatingmode": "mig",
        "devicesplitcount": 5,
        "devicememoryscaling": 1.8,
        "devicecorescaling": 2,
        "filterdevices": {"uuid": (G1,), "index": (0, 2)},
        "migstrategy": "mixed",
        "enablegetpreferredallocation": True,
    } == entry


def test_two_entries_of_one_name_both_stay():
    text = vectors("nodeconfig")["nodeconfig-088"].given["config.json"]
    assert [5, 7] == [entry["devicesplitcount"] for entry in decode_nodeconfig(text)]


def test_keys_in_another_case_are_read_and_unknown_ones_are_not():
    text = vectors("nodeconfig")["nodeconfig-097"].given["config.json"]
    assert ({"name": "node-a", "devicesplitcount": 4},) == decode_nodeconfig(text)


@given(st.text() | st.text(alphabet='{}[]":,nodecfigam01', max_size=60))
def test_any_text_is_read_or_refused_and_nothing_else(text: str):
    try:
        entries = decode_nodeconfig(text)
    except MalformedText:
        return
    assert isinstance(entries, tuple)
