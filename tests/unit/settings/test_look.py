"""One look at the sources: what is there, what is the same, what is gone, and where to look."""

import asyncio
import json
from pathlib import Path

import pytest

from agent.settings import reading as door
from agent.settings.reading import SourcesRead
from agent.settings.sources import NodeFacts, Sources
from tests.fakes.offload import Hanging
from tests.fakes.settings_files import look


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    """An own file at its usual place, and the names of HAMi's files from flags."""
    (tmp_path / "own.yaml").write_text("sharing: {splitCount: 4}\n")
    monkeypatch.setattr(door, "DEFAULT_FILE", tmp_path / "own.yaml")
    return Sources(None, {}, {"--nodeconfig": f"{tmp_path}/config.json", "--device-config": ""})


def good_of(sources: Sources, tmp_path: Path) -> Sources:
    (tmp_path / "config.json").write_text(json.dumps({"nodeconfig": []}))
    found = look(sources)
    assert found.refusal is None
    return found.sources


def split_count(found: SourcesRead) -> object:
    assert found.plan is not None
    return found.plan.resolve(NodeFacts())["sharing.splitCount"].value


def test_the_same_bytes_are_no_news(sources, tmp_path):
    good = good_of(sources, tmp_path)
    (tmp_path / "own.yaml").write_text("sharing: {splitCount: 4}\n")

    found = look(sources, good)

    assert (None, None) == (found.plan, found.refusal)


def test_other_bytes_are_a_plan(sources, tmp_path):
    good = good_of(sources, tmp_path)
    (tmp_path / "own.yaml").write_text("sharing: {splitCount: 5}\n")

    assert 5 == split_count(look(sources, good))


def test_every_file_that_was_looked_for_is_named(sources, tmp_path):
    good_of(sources, tmp_path)

    assert {tmp_path / "own.yaml", tmp_path / "config.json"} == look(sources).asked


def test_a_refused_file_hides_no_other_one(sources, tmp_path):
    good_of(sources, tmp_path)
    (tmp_path / "d.yaml").write_text("nvidia: [")
    named = {**sources.flags, "--device-config": f"{tmp_path}/d.yaml"}

    found = look(Sources(None, {}, named))

    assert found.refusal is not None
    assert str(tmp_path / "d.yaml") in str(found.refusal)
    assert {"own.yaml", "d.yaml", "config.json"} == {path.name for path in found.asked}
    assert found.sources.own is not None


def test_a_file_that_is_gone_is_refused_while_it_is_looked_for(sources, tmp_path):
    good = good_of(sources, tmp_path)
    (tmp_path / "own.yaml").unlink()

    found = look(sources, good)

    assert f"{tmp_path}/own.yaml: was removed" in str(found.refusal)
    assert tmp_path / "own.yaml" in found.asked


def test_a_named_file_that_is_gone_is_refused_too(sources, tmp_path):
    good = good_of(sources, tmp_path)
    (tmp_path / "config.json").unlink()

    assert "config.json: cannot be read: No such file" in str(look(sources, good).refusal)


def test_a_file_that_is_named_no_more_may_be_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(door, "DEFAULT_FILE", tmp_path / "own.yaml")
    own = tmp_path / "own.yaml"
    own.write_text(f"files: {{nodeConfig: {tmp_path}/config.json, deviceConfig: ''}}\n")
    sources = Sources(None, {}, {})
    good = good_of(sources, tmp_path)
    (tmp_path / "config.json").unlink()
    own.write_text("files: {nodeConfig: '', deviceConfig: ''}\nsharing: {splitCount: 7}\n")

    assert 7 == split_count(look(sources, good))


def test_at_a_start_a_missing_file_is_no_file(sources, tmp_path):
    good_of(sources, tmp_path)
    (tmp_path / "own.yaml").unlink()

    assert 10 == split_count(look(sources))


def test_a_usual_file_that_cannot_be_looked_at_is_refused(sources, tmp_path, monkeypatch):
    good_of(sources, tmp_path)
    monkeypatch.setattr(door, "DEFAULT_FILE", tmp_path / ("x" * 300))

    assert "File name too long" in str(look(sources).refusal)


@pytest.mark.parametrize("name", ["own.yaml", "d.yaml", "config.json"])
async def test_a_file_that_does_not_answer_is_refused_by_its_name(sources, tmp_path, name):
    for one in ("d.yaml", "config.json"):
        (tmp_path / one).write_text("{}")
    flags = {**sources.flags, "--device-config": f"{tmp_path}/d.yaml"}
    began = asyncio.get_running_loop().time()

    found = await door.look(Sources(None, {}, flags), Hanging(name))

    assert f"{tmp_path}/{name}: was not read within 30 s; check the" in str(found.refusal)
    assert found.silent
    assert door.DEADLINE == asyncio.get_running_loop().time() - began
