"""The files of settings are read where they are named; a start falls back to the last good copy.

The scheduler and the resource's name change on a drained node alone.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.errors import SettingsError
from agent.ledger import LastGood, Ledger, SourceFile
from agent.settings import reading
from agent.settings.reading import COPY, Sources, SourcesRead, make_plan, stand_in
from agent.state import LAST_GOOD_KIND, seal
from tests.builders import NODE, a_row
from tests.fakes.offload import Blocked, Hanging, Inline
from tests.fakes.settings_files import begin, load, look

OWN = b"sharing: {splitCount: 4}\n"
BAD = "sharing: {splitCount: many}\n"
Keep = Callable[[bytes], None]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    """An own file at its usual place, and HAMi's config.json, which a flag names."""
    (tmp_path / "own.yaml").write_bytes(OWN)
    (tmp_path / "n.json").write_text(json.dumps({"nodeconfig": []}))
    monkeypatch.setattr(reading, "DEFAULT_FILE", tmp_path / "own.yaml")
    flags = {"--nodeconfig": f"{tmp_path}/n.json", "--device-config": ""}
    return Sources(None, {}, {**flags, "--state-dir": f"{tmp_path}/state"})


@pytest.fixture
def keep(tmp_path: Path) -> Keep:
    """Puts a copy with this own file into the state directory."""
    (tmp_path / "state").mkdir()

    def write(own: bytes = OWN) -> None:
        copy = LastGood("0.0.9", "node-a", own=SourceFile("/then/own.yaml", own))
        (tmp_path / "state" / COPY).write_bytes(seal(LAST_GOOD_KIND, copy))

    return write


def split_count(found: SourcesRead, node: str = "") -> object:
    return found.taken().resolve(node)["sharing.splitCount"].value


# One look at the sources.


@pytest.mark.parametrize(
    ("name", "text"), [("own.yaml", BAD), ("own.yaml", None), ("n.json", "{"), ("n.json", None)]
)
def test_the_same_refusal_is_no_news_and_what_is_mended_is(sources, tmp_path, name, text):
    good, path = look(sources), tmp_path / name
    before = path.read_bytes()
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    bad = look(sources, good)

    assert str(bad.refusal).startswith(str(path))
    assert bad is asyncio.run(reading.look(sources, Inline(), bad, good.sources))
    path.write_bytes(before)
    assert 4 == split_count(look(sources, bad))


@pytest.mark.parametrize("name", ["own.yaml", "d.yaml", "n.json"])
async def test_a_file_that_does_not_answer_is_refused_by_its_name(
    sources, tmp_path, monkeypatch, name
):
    (tmp_path / "d.yaml").write_text("{}")
    flags = {**sources.flags, "--device-config": f"{tmp_path}/d.yaml"}
    began = asyncio.get_running_loop().time()

    found = await reading.look(Sources(None, {}, flags), Hanging(name, monkeypatch))

    assert f"{tmp_path}/own.yaml, or a file of HAMi's, was not read" in str(found.refusal)
    assert reading.DEADLINE == asyncio.get_running_loop().time() - began
    again = await reading.look(Sources(None, {}, flags), Hanging(name, monkeypatch), found)
    assert found is again, "it was told"
    assert found is await reading.look(Sources(None, {}, flags), Blocked(), found)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("own", None, "own: cannot be read: No such file"),
        ("own", b"x: " + 1_100_000 * b"y", "own: is larger than 1024 KiB"),
        ("d", None, "d: cannot be read: No such file"),
        ("n", b"[{x: y\x00\xff" * 140_000, "n: is larger than"),
        ("d", b"[{x: y\x00\xff", "d: is not UTF-8"),
        (300 * "x", None, "File name too long; check the path and its rights"),
        ("/proc/self/mem", None, "/proc/self/mem: cannot be read: Input/output error"),
        ("loop", None, "loop: cannot be read: Too many levels"),
        ("here", None, "here: cannot be read: Is a directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path, file, content, says):
    path = tmp_path / file
    (tmp_path / "here").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    if content is not None:
        path.write_bytes(content)
    flags = {"d": {"--device-config": str(path)}, "n": {"--nodeconfig": str(path)}}
    with pytest.raises(SettingsError) as caught:
        load(Sources(path if file not in flags else None, {}, flags.get(file, {})))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, None),
        (Path.mkdir, None),
        (lambda path: path.symlink_to(path), None),
        (lambda path: path.write_text(BAD), ":1:23: sharing.splitCount"),
        (lambda path: path.symlink_to("/proc/self/mem"), ": cannot be read: Input/output error"),
    ],
)
def test_the_default_file_may_be_missing_and_may_not_be_bad(sources, tmp_path, make, says):
    path = tmp_path / "own.yaml"
    path.unlink()
    make(path)
    found = look(sources)
    if says is None:
        assert 10 == split_count(found)
    else:
        assert f"{path}{says}" in str(found.refusal)


# What a start goes by: the sources, else the last good copy of them, else nothing at all.


def test_refused_sources_give_way_to_the_copy_below_flags_and_environment(sources, tmp_path, keep):
    (tmp_path / "own.yaml").write_text(BAD)
    own = b"sharing: {splitCount: 4, memoryScaling: 2}\n"
    keep(own)

    start = begin(sources)

    assert 4 == split_count(start)
    assert f"{tmp_path}/own.yaml:1:23: sharing.splitCount" in str(start.refusal)
    assert SourceFile("/then/own.yaml", own) == start.taken().sources.own
    flags = {**sources.flags, "--split-count": "6"}
    start = begin(Sources(None, {"HAMI_AGENT_SHARING_CORE_SCALING": "3"}, flags))
    sharing = start.taken().settings().sharing
    assert (6, 2.0, 3.0) == (sharing.split_count, sharing.memory_scaling, sharing.core_scaling)


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 1, "written_by'])
def test_refused_sources_with_a_damaged_copy_are_refused(sources, tmp_path, keep, content: bytes):
    (tmp_path / "own.yaml").write_text(BAD)
    (tmp_path / "state" / COPY).write_bytes(content)
    with pytest.raises(SettingsError, match=r"own\.yaml:1:23"):
        begin(sources)


async def test_a_file_that_does_not_answer_gives_way_to_the_copy(
    sources, tmp_path, monkeypatch, keep
):
    keep()
    start = await reading.begin(sources, Hanging("own.yaml", monkeypatch), Inline())
    assert 4 == split_count(start)
    assert f"{tmp_path}/own.yaml, or a file of HAMi's, was not read" in str(start.refusal)


OLD, NEW = "nvidia.com/gpu", "example.com/vgpu"


ROWS = Ledger((a_row(pod="p", resource=OLD),))


def said(ledger: Ledger, scheduler: str = "hami", resource: str = OLD) -> str:
    own = f"scheduler: {scheduler}\nsharing: {{resourceName: {resource}}}"
    plan = make_plan(Sources(own=SourceFile("c.yaml", own.encode()), host=NODE))
    try:
        plan.check_rows(ledger)
    except SettingsError as error:
        return str(error)
    return ""


def test_another_name_is_refused_with_its_place_and_what_to_do():
    assert (
        "c.yaml:2:25: sharing.resourceName cannot change from nvidia.com/gpu to example.com/vgpu "
        "while pods hold slices; running pods go on: drain the node (kubectl drain node-1) or "
        "delete the pods that `hami-agent status --by pod` names, or set it back; slices are held "
        "for 60 to 75 s after their pod has gone"
    ) == said(ROWS, resource=NEW)


@pytest.mark.parametrize(
    ("kept", "stands_in"),
    [
        ("", True),
        (f"sharing: {{resourceName: {NEW}}}", False),
        ("sharing: 7", False),
        (None, False),
    ],
)
def test_last_good_settings_stand_in_for_those_that_the_rows_refuse(kept, *, stands_in: bool):
    now = Sources(own=SourceFile("c.yaml", f"sharing: {{resourceName: {NEW}}}".encode()))
    copy = None if kept is None else LastGood("0", NODE, own=SourceFile("c.yaml", kept.encode()))
    found = stand_in(copy, now, ROWS)
    assert stands_in == (found is not None)
    if found is not None:
        found.check_rows(ROWS)
