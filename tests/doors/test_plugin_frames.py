"""Frames are the bytes of the generated message and of Google's, and never too many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.errors import SettingsError
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.slices import SliceGroup, SliceId, SliceList
from agent.plugin.frames import LIST_LIMIT, ListFrames, check_size, encode_group
from agent.wire.v1beta1 import Device, ListAndWatchResponse, NumaNode, TopologyInfo
from tests.fakes.door import a_group, a_list
from tests.fakes.grpc_messages import message

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=150)
groups = st.builds(
    SliceGroup,
    uuid=texts.map(GpuUuid),
    ids=st.lists(texts.map(SliceId), max_size=4).map(tuple),
    healthy=st.booleans(),
    numa=st.none() | st.integers(-1, 2**63 - 1),
)
lists = st.builds(
    SliceList, generation=st.integers(), groups=st.lists(groups, max_size=4).map(tuple)
)


def plainly(listed: SliceList) -> ListAndWatchResponse:
    """The list as the generated classes say it."""
    devices = []
    for group in listed.groups:
        numa = -1 if group.numa is None else group.numa
        topology = None if numa < 0 else TopologyInfo([NumaNode(numa)])
        health = "Healthy" if group.healthy else "Unhealthy"
        devices += [Device(text, health, topology) for text in group.ids]
    return ListAndWatchResponse(devices)


@given(lists)
def test_a_frame_is_the_generated_message_and_googles(listed: SliceList):
    frame = ListFrames().encode(listed)

    assert bytes(plainly(listed)) == bytes(frame) == frame.SerializeToString()
    theirs = message("ListAndWatchResponse").FromString(bytes(frame))
    assert theirs.SerializeToString(deterministic=True) == bytes(frame)


@given(st.lists(lists, min_size=2, max_size=5))
def test_what_was_encoded_before_does_not_change_a_frame(row: list[SliceList]):
    frames = ListFrames()

    for listed in [*row, *row]:
        assert bytes(plainly(listed)) == bytes(frames.encode(listed))


@given(groups)
def test_the_worst_size_is_the_size_when_all_are_unhealthy(group: SliceGroup):
    ill = SliceGroup(group.uuid, group.ids, healthy=False, numa=group.numa)

    assert len(encode_group(ill).wire) == encode_group(group).worst_size


def test_a_list_is_refused_from_the_first_byte_too_many_even_while_all_is_well():
    per_slice = encode_group(a_group(slices=1)).worst_size
    uuid = a_group().uuid
    fitting, rest = divmod(LIST_LIMIT, per_slice)
    ids = tuple(SliceId(f"{uuid}-{number % 10}") for number in range(fitting))
    listed = SliceList(1, (SliceGroup(uuid, ids, healthy=True, numa=0),))
    assert rest < per_slice
    assert len(bytes(ListFrames().encode(listed))) < LIST_LIMIT
    check_size(listed.groups)

    more = SliceGroup(uuid, (*ids, ids[0]), healthy=True, numa=0)
    size = (fitting + 1) * per_slice

    with pytest.raises(SettingsError) as caught:
        ListFrames().encode(SliceList(1, (more,)))
    for part in (f"{fitting + 1} slices on 1 GPUs", f"{size} bytes", f"at most {fitting} slices"):
        assert part in str(caught.value)
    with pytest.raises(SettingsError):
        check_size((more,))


def test_what_did_not_change_is_not_encoded_again():
    frames = ListFrames()
    listed = a_list(1, a_group(0), a_group(1))
    first = frames.encode(listed)

    frames.encode(a_list(2, a_group(0), a_group(1, healthy=False)))

    assert {a_group(0), a_group(1, healthy=False)} == set(frames._groups)
    assert frames.encode(listed) is not first
    assert bytes(first) == bytes(frames.encode(listed))
    assert frames.encode(listed) is frames.encode(listed)
