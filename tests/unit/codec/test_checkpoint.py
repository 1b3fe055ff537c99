"""The state file says what was written, or says that it does not.

The last good settings read back as they were written, or are said to be unusable.
"""

import hashlib
import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from agent.errors import StateCorrupt
from agent.ledger import LastGood, Ledger, Row, SourceFile, State
from agent.model import Health
from agent.state import LAST_GOOD_KIND, VERSION, decode_state, encode_state, seal, unseal
from tests.builders import a_uuid

GOLDEN = Path(__file__).parents[2] / "golden" / "state-version-1.json"
FORMER = GOLDEN.with_name("state-version-1-of-0.1.json")
OWING = GOLDEN.with_name("state-version-1-with-outbox.json")
"""From before effects were derived. Its reader also finds an outbox, an empty one, in what is
written now: `test_an_agent_of_the_version_before_reads_what_is_written`."""


def a_full_state() -> State:
    """A state in which no field of a row's kind has its default."""
    return decode_state(GOLDEN.read_bytes())


def a_file(data: object, **changes: object) -> bytes:
    """A state file around any data, with a right checksum."""
    raw = json.dumps(data)
    checksum = hashlib.sha256(raw.encode()).hexdigest()
    head = {"kind": "hami-agent-state", "version": VERSION, "checksum": checksum, **changes}
    return f'{json.dumps(head)[:-1]}, "data": {raw}}}'.encode()


def data_of(state: State) -> dict:
    return json.loads(encode_state(state))["data"]


def test_a_file_of_version_1_reads_for_ever_and_is_written_like_this():
    assert a_full_state() == decode_state(FORMER.read_bytes())
    assert a_full_state() == decode_state(OWING.read_bytes())
    assert GOLDEN.read_bytes() == encode_state(a_full_state())


ROW_KEYS = {"confirmed", "offered", "resource", "lock", "priority", "live_limits"}
"""Those that came after the first files."""


def missing(kind: type[msgspec.Struct]) -> list[tuple[str, object]]:
    """The fields of a struct that have a default, and what it is."""
    return [
        (one.name, one.default_factory() if one.default is msgspec.NODEFAULT else one.default)
        for one in msgspec.structs.fields(kind)
        if not one.required
    ]


OF_ROWS = [("row", *one) for one in missing(Row) if one[0] in ROW_KEYS]
OF_HEALTH = [("health", *one) for one in missing(Health)]


@pytest.mark.parametrize(("kind", "key", "default"), [*OF_ROWS, *OF_HEALTH], ids=str)
def test_a_file_from_before_a_key_of_a_row_or_of_health_reads_without(kind, key, default):
    state = a_full_state()
    data, (row, plain) = data_of(state), state.ledger.rows
    ledger, ill = state.ledger, state.health
    if kind == "row":
        del data["ledger"]["rows"][0][key]
        ledger = Ledger((replace(row, **{key: default}), plain))
    else:
        for health in data["health"].values():
            del health[key]
        ill = {u: replace(one, **{key: default}) for u, one in ill.items()}

    earlier = replace(state, ledger=ledger, health=ill)
    assert earlier == decode_state(a_file(data))


def test_the_health_of_every_gpu_is_kept():
    (one,) = a_full_state().health.values()
    state = State(health={a_uuid(number): one for number in range(8)})
    assert state.health == decode_state(encode_state(state)).health


def test_every_flipped_bit_is_noticed():
    content = encode_state(a_full_state())
    for place in range(len(content)):
        for bit in range(8):
            torn = bytearray(content)
            torn[place] ^= 1 << bit
            with pytest.raises(StateCorrupt):
                decode_state(bytes(torn))


EMPTY = data_of(State())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *(
            (content, "cannot be read")
            for content in (b"", b"{}", b"[]", b"\xff\xfe", b"null", b"[" * 100_000)
        ),
        *(
            (a_file(EMPTY, version=version), f"version {version}")
            for version in (VERSION - 1, VERSION + 2, -1)
        ),
        (a_file({}, kind="shopping-list"), "its kind is shopping-list"),
    ],
    ids=lambda value: str(value[:60]),
)
def test_what_is_no_state_file_of_this_version_or_the_next_is_corrupt(content, says):
    with pytest.raises(StateCorrupt, match=says):
        decode_state(content)


def test_keys_that_this_version_does_not_know_are_ignored_at_every_depth():
    data = data_of(a_full_state())
    data["new"] = {"x": 1}
    for part in (data["ledger"], *data["ledger"]["rows"]):
        part["new"] = [1]
    for health in data["health"].values():
        health["new"] = "x"
    assert a_full_state() == decode_state(a_file(data, new_head=1))


def test_a_file_of_the_next_version_is_read_after_a_downgrade():
    assert State() == decode_state(a_file(data_of(State()), version=VERSION + 1))


def test_data_of_another_shape_is_refused_although_its_checksum_is_right():
    data = data_of(a_full_state())
    data["ledger"]["rows"][0]["role"] = "captain"
    with pytest.raises(StateCorrupt, match="captain"):
        decode_state(a_file(data))


def test_an_agent_of_the_version_before_reads_what_is_written():
    former = json.loads(OWING.read_bytes())["data"]["ledger"]
    ledger = data_of(a_full_state())["ledger"]
    assert [] == ledger["outbox"]
    assert former["rows"][0].pop("told") is True  # it is false where it is missing
    for kind in ("rows", "plain"):
        for before, row in zip(former[kind], ledger[kind], strict=True):
            assert before == {name: value for name, value in row.items() if name in before}


@pytest.mark.parametrize(("holder", "expected"), [(True, True), (False, False)])
def test_what_the_version_before_knew_to_be_held_was_confirmed(holder, expected):
    data = json.loads(FORMER.read_bytes())["data"]
    (plain,) = data["ledger"]["plain"]
    plain |= {"recorded": False} if holder else {"recorded": False, "holder": None}
    assert expected is decode_state(a_file(data)).ledger.rows[1].confirmed


SETTINGS_GOLDEN = Path(__file__).parents[2] / "golden" / "settings-version-1.json"
COPY = LastGood("0.1.0", "node-a", {"pool": "big"}, own=SourceFile("/etc/c.yaml", b"a: \xff"))


def test_what_is_written_reads_back():
    for copy in (COPY, LastGood("", "")):
        assert copy == unseal(seal(LAST_GOOD_KIND, copy), LAST_GOOD_KIND, LastGood)


def test_settings_of_version_1_read_for_ever_and_are_written_like_this():
    content = SETTINGS_GOLDEN.read_bytes()
    copy = unseal(content, LAST_GOOD_KIND, LastGood)
    assert content == seal(LAST_GOOD_KIND, copy)
    assert ("0.1.0", "node-a", {"pool": "big"}) == (copy.written_by, copy.node, copy.labels)
    assert copy.own == SourceFile("/etc/hami-agent/config.yaml", b"sharing: {splitCount: 8}\n")
    assert copy.node_config is None


def test_keys_of_a_later_version_are_ignored_and_missing_ones_are_nothing():
    data = {"written_by": "9.0.0", "node": "node-a", "more": [1]}
    version, later = (f'"version":{number}'.encode() for number in (VERSION, VERSION + 1))
    content = seal(LAST_GOOD_KIND, data).replace(version, later)
    assert LastGood("9.0.0", "node-a") == unseal(content, LAST_GOOD_KIND, LastGood)
