"""`hami-agent release`: what is asked, what is shown, exit codes."""

import pytest

from agent.cli import release
from tests.cli import gpu_agent

pytestmark = pytest.mark.looptime(False)

DATA = {"gpus": ["GPU-3"], "heldBy": [], "released": True, "obstacle": ""}


def an_agent(path, status=200, raw=None, **changes):
    return gpu_agent.an_agent(path, "Release", DATA | changes, status, raw)


async def run(*argv):
    return await gpu_agent.run(release, "release", *argv)


async def test_a_gpu_that_nobody_holds_is_free_for_the_work(tmp_path, capsys):
    path = tmp_path / "s.sock"
    async with an_agent(path) as agent:
        code = await run("3", "--socket", path)

    assert (0, ["/api/v1/gpus/3:release"]) == (code, agent.asked)
    assert "GPU-3: released; `hami-agent recheck` takes it back\n" == capsys.readouterr().out


async def test_pods_that_have_it_are_named(tmp_path, capsys):
    path = tmp_path / "s.sock"
    async with an_agent(path, heldBy=["ml/train-0"]):
        code = await run("all", "--socket", path)

    assert 1 == code
    assert "held by pod ml/train-0: delete it first\n" in capsys.readouterr().out


async def test_what_holds_it_open_is_said(tmp_path, capsys):
    path = tmp_path / "s.sock"
    async with an_agent(path, released=False, obstacle="a call has not come back"):
        code = await run("3", "--socket", path)

    told = capsys.readouterr().out
    assert 1 == code
    assert "holds it open: a call has not come back\nrelease it again" in told


async def test_several_are_taken_back_with_one_word(tmp_path, capsys):
    path = tmp_path / "s.sock"
    async with an_agent(path, gpus=["GPU-3", "GPU-4"]):
        await run("all", "--socket", path)

    told = "GPU-3, GPU-4: released; `hami-agent recheck all` takes them back\n"
    assert told == capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "../x", "a:b", "x" * 65])
async def test_what_is_no_name_of_a_gpu_is_wrong_usage_and_nothing_is_asked(tmp_path, capsys, name):
    path = tmp_path / "s.sock"
    async with an_agent(path) as agent:
        with pytest.raises(SystemExit) as ended:
            await run(name, "--socket", path)

    assert (2, []) == (ended.value.code, agent.asked)
    assert "is not an index, a UUID or `all`" in capsys.readouterr().err
