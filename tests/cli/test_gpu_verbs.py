"""What `recheck` and `release` have in common: the answer as JSON, and what went wrong."""

import json

import pytest

from agent.cli import recheck, release
from tests.cli.gpu_agent import an_agent, run
from tests.cli.test_recheck import DATA as RECHECKED
from tests.cli.test_release import DATA as RELEASED

pytestmark = [
    pytest.mark.looptime(False),
    pytest.mark.parametrize("verb", [recheck, release], ids=["recheck", "release"]),
]


@pytest.fixture
def name(verb) -> str:
    return verb.__name__.rpartition(".")[2]


async def test_json_says_where_it_is_from(tmp_path, capsys, verb, name):
    path = tmp_path / "s.sock"
    data, code = (RECHECKED, 1) if verb is recheck else (RELEASED, 0)
    async with an_agent(path, name.capitalize(), data):
        assert code == await run(verb, name, "3", "--socket", path, "-o", "json")

    document = json.loads(capsys.readouterr().out)
    assert ("hami-agent/v1", name.capitalize(), str(path), data) == (
        document["apiVersion"],
        document["kind"],
        document["source"],
        document["data"],
    )


@pytest.mark.parametrize(
    ("status", "raw", "code"),
    [(404, "There is no GPU 9 here.", 4), (403, "Only root may do this.", 1), (200, "{}", 3)],
)
async def test_what_went_wrong_is_said_and_has_its_exit_code(
    tmp_path, capsys, verb, name, status, raw, code
):
    path = tmp_path / "s.sock"
    async with an_agent(path, name.capitalize(), {}, status, raw):
        assert code == await run(verb, name, "9", "--socket", path)

    assert f"hami-agent {name}: " in capsys.readouterr().err


async def test_nobody_at_the_socket_is_unreachable(tmp_path, capsys, verb, name):
    assert 3 == await run(verb, name, "0", "--socket", tmp_path / "none.sock")
    assert "is the agent running" in capsys.readouterr().err
