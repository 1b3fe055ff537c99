"""The last good settings read back as they were written, or are said to be unusable."""

from pathlib import Path

from agent.ledger import LastGood, SourceFile
from agent.state import LAST_GOOD_KIND, VERSION, seal, unseal

GOLDEN = Path(__file__).parents[2] / "golden" / "settings-version-1.json"
COPY = LastGood("0.1.0", "node-a", {"pool": "big"}, own=SourceFile("/etc/c.yaml", b"a: \xff"))


def test_what_is_written_reads_back():
    for copy in (COPY, LastGood("", "")):
        assert copy == unseal(seal(LAST_GOOD_KIND, copy), LAST_GOOD_KIND, LastGood)


def test_a_file_of_version_1_reads_for_ever_and_is_written_like_this():
    content = GOLDEN.read_bytes()
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
