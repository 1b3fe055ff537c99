"""The last good settings read back as they were written, or are said to be unusable."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from agent.ledger import LastGood, SourceFile
from agent.state import LAST_GOOD_KIND, VERSION, decode_last_good, encode_last_good, seal

GOLDEN = Path(__file__).parents[2] / "golden" / "settings-version-1.json"
TEXT = st.text(max_size=10)
FILES = st.none() | st.builds(SourceFile, name=TEXT, content=st.binary(max_size=30))
COPIES = st.builds(
    LastGood,
    written_by=TEXT,
    node=TEXT,
    labels=st.none() | st.dictionaries(TEXT, TEXT, max_size=3),
    device_config=FILES,
    own=FILES,
    node_config=FILES,
)
COPY = LastGood("0.1.0", "node-a", {"pool": "big"}, own=SourceFile("/etc/c.yaml", b"a: \xff"))


@given(COPIES)
def test_what_is_written_reads_back(copy: LastGood):
    assert copy == decode_last_good(encode_last_good(copy))


def test_a_file_of_version_1_reads_for_ever_and_is_written_like_this():
    content = GOLDEN.read_bytes()
    copy = decode_last_good(content)

    assert content == encode_last_good(copy)
    assert ("0.1.0", "node-a", {"pool": "big"}) == (copy.written_by, copy.node, copy.labels)
    assert copy.own == SourceFile("/etc/hami-agent/config.yaml", b"sharing: {splitCount: 8}\n")
    assert copy.node_config is None


def test_keys_of_a_later_version_are_ignored_and_missing_ones_are_nothing():
    data = {"written_by": "9.0.0", "node": "node-a", "more": [1]}
    version, later = (f'"version":{number}'.encode() for number in (VERSION, VERSION + 1))
    content = seal(LAST_GOOD_KIND, data).replace(version, later)

    assert LastGood("9.0.0", "node-a") == decode_last_good(content)
