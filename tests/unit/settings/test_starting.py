"""What a start goes by: the sources, else the last good copy of them, else nothing at all."""

from collections.abc import Callable
from pathlib import Path

import pytest

from agent.errors import SettingsError
from agent.ledger import LastGood, SourceFile
from agent.settings import reading
from agent.settings.reading import COPY, SourcesRead, last_good, recalled
from agent.settings.sources import NodeFacts, Sources
from agent.state import encode_last_good
from tests.fakes.offload import Hanging, Inline
from tests.fakes.settings_files import begin

GOOD = b"sharing: {splitCount: 4}\n"
BAD = "sharing: {splitCount: many}\n"
Keep = Callable[[LastGood], None]


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    (tmp_path / "own.yaml").write_bytes(GOOD)
    flags = {"--state-dir": f"{tmp_path}/state", "--nodeconfig": "", "--device-config": ""}
    return Sources(tmp_path / "own.yaml", {}, flags)


@pytest.fixture
def keep(tmp_path: Path) -> Keep:
    """Puts a copy into the state directory."""
    (tmp_path / "state").mkdir()

    def write(copy: LastGood) -> None:
        (tmp_path / "state" / COPY).write_bytes(encode_last_good(copy))

    return write


def a_copy(own: bytes = GOOD) -> LastGood:
    return LastGood("0.0.9", "node-a", own=SourceFile("/then/own.yaml", own))


def split_count(start: SourcesRead) -> int:
    return start.taken().settings(NodeFacts()).sharing.split_count


def test_good_sources_need_no_copy(sources, keep):
    keep(a_copy(b"sharing: {splitCount: 9}\n"))

    start = begin(sources)

    assert (4, None) == (split_count(start), start.refusal)
    assert {sources.file} == start.asked


def test_refused_sources_give_way_to_the_copy_and_are_watched(sources, keep):
    sources.file.write_text(BAD)
    keep(a_copy())

    start = begin(sources)

    assert 4 == split_count(start)
    assert f"{sources.file}:1:23: sharing.splitCount" in str(start.refusal)
    assert {sources.file} == start.asked
    assert start.taken().sources.own == SourceFile("/then/own.yaml", GOOD)


def test_flags_and_environment_stay_on_top_of_the_copy(sources, keep):
    sources.file.write_text(BAD)
    keep(a_copy(b"sharing: {splitCount: 4, memoryScaling: 2}\n"))
    flags = {**sources.flags, "--split-count": "6"}

    start = begin(Sources(sources.file, {"HAMI_AGENT_SHARING_CORE_SCALING": "3"}, flags))

    sharing = start.taken().settings(NodeFacts()).sharing
    assert (6, 2.0, 3.0) == (sharing.split_count, sharing.memory_scaling, sharing.core_scaling)


def test_without_a_copy_the_start_is_refused_and_none_is_spoken_of(sources):
    sources.file.write_text(BAD)

    with pytest.raises(SettingsError, match=r"own.yaml:1:23") as caught:
        begin(sources)

    assert "last good" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", encode_last_good(a_copy())[:-9]])
def test_a_damaged_copy_is_none(sources, tmp_path, content: bytes):
    sources.file.write_text(BAD)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / COPY).write_bytes(content)

    with pytest.raises(SettingsError, match=r"own.yaml:1:23"):
        begin(sources)


def test_a_missing_file_and_a_damaged_copy_are_both_told_in_one_sentence(sources, tmp_path):
    sources.file.unlink()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / COPY).write_bytes(b"{")

    with pytest.raises(SettingsError) as caught:
        begin(sources)

    missing, copy = str(caught.value).split("; the last good settings cannot be used either: ")
    assert missing.startswith(f"{sources.file}: cannot be read: No such file")
    assert copy.startswith(f"{tmp_path}/state/settings.json: ")
    assert "\n" not in copy


def test_a_copy_that_is_refused_itself_is_told_too(sources, keep):
    sources.file.write_text(BAD)
    keep(a_copy(b"sharing: {splitCount: 99999}\n"))

    with pytest.raises(SettingsError, match=r"own.yaml:1:23.*/then/own.yaml:1:23: .* 1 to 10000"):
        begin(sources)


def test_a_wrong_variable_is_refused_for_no_copy_can_mend_it(sources, keep):
    keep(a_copy())

    with pytest.raises(SettingsError, match="HAMI_AGENT_SHARNG"):
        begin(Sources(sources.file, {"HAMI_AGENT_SHARNG": "1"}, sources.flags))


def test_a_good_own_file_says_where_the_copy_is_when_hamis_file_is_bad(tmp_path, keep):
    (tmp_path / "own.yaml").write_text(f"paths: {{state: {tmp_path}/state}}\n")
    (tmp_path / "d.yaml").write_text("nvidia: [\n")
    keep(a_copy())
    flags = {"--nodeconfig": "", "--device-config": f"{tmp_path}/d.yaml"}

    start = begin(Sources(tmp_path / "own.yaml", {}, flags))

    assert 4 == split_count(start)
    assert f"{tmp_path}/d.yaml" in str(start.refusal)


def test_what_is_kept_is_what_is_recalled(sources):
    plan = begin(sources).taken()
    copy = last_good(plan.sources, NodeFacts("node-a", {"pool": "big"}))

    again = recalled(copy, plan.sources)

    assert again is not None
    assert plan.sources == again.sources
    assert ("node-a", {"pool": "big"}) == (copy.node, copy.labels)


async def test_a_file_that_does_not_answer_gives_way_to_the_copy_too(sources, keep):
    keep(a_copy())

    start = await reading.begin(sources, Hanging("own.yaml"), Inline())

    assert 4 == split_count(start)
    assert f"{sources.file}: was not read within 30 s" in str(start.refusal)


async def test_a_copy_that_does_not_answer_is_told_too(sources, keep):
    sources.file.write_text(BAD)
    keep(a_copy())

    with pytest.raises(SettingsError, match=r"own.yaml:1:23.*/state/settings.json: was not read"):
        await reading.begin(sources, Inline(), Hanging(COPY))
