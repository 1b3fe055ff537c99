"""`hami-agent limit`: what is asked, what is shown, exit codes."""

import json

import pytest

from agent.cli import limit
from tests.cli import gpu_agent

pytestmark = pytest.mark.looptime(False)

GPU = {
    "gpu": "0",
    "uuid": "GPU-0",
    "memoryMib": 12288,
    "cores": 0,
    "wasMemoryMib": 8192,
    "wasCores": 30,
    "answeredMemoryMib": 8192,
    "answeredCores": 30,
}
DATA = {
    "namespace": "ml",
    "pod": "train-0",
    "container": "main",
    "changed": True,
    "reset": False,
    "gpus": [GPU],
    "obstacle": "",
    "notes": ["The memory limit acts on the next allocation."],
}


def an_agent(path, status=200, raw=None, **changes):
    return gpu_agent.an_agent(path, "Limit", DATA | changes, status, raw)


async def run(*argv):
    return await gpu_agent.run(limit, "limit", *argv)


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (("ml/train-0", "--memory", "12Gi"), "/api/v1/pods/ml/train-0:limit?memoryMib=12288"),
        (
            ("train-0", "--cores", "0", "--gpu", "1", "--container", "a"),
            "/api/v1/pods/train-0:limit?container=a&gpu=1&cores=0",
        ),
        (("train-0", "--reset"), "/api/v1/pods/train-0:limit?reset=true"),
    ],
)
async def test_the_agent_is_asked_for_exactly_that(tmp_path, argv, asked):
    path = tmp_path / "s.sock"
    async with an_agent(path) as agent:
        code = await run(*argv, "--socket", path)

    assert (0, [asked]) == (code, agent.targets)


async def test_what_changed_is_told_with_what_follows(tmp_path, capsys):
    path = tmp_path / "s.sock"
    async with an_agent(path):
        await run("train-0", "--memory", "12Gi", "--socket", path)

    assert (
        "container main of pod ml/train-0: GPU 0: memory 12288 MiB (was 8192 MiB), cores no limit "
        "(was 30 %)\nThe memory limit acts on the next allocation.\n"
    ) == capsys.readouterr().out


async def test_where_nothing_changed_that_is_told(tmp_path, capsys):
    path = tmp_path / "s.sock"
    same = GPU | {"wasMemoryMib": 12288, "wasCores": 0}
    async with an_agent(path, changed=False, notes=[], gpus=[same]):
        code = await run("train-0", "--reset", "--socket", path)

    assert 0 == code
    assert (
        "container main of pod ml/train-0: GPU 0: memory 12288 MiB, cores no limit\n"
        "nothing was changed\n"
    ) == capsys.readouterr().out


async def test_for_programs_it_is_json(tmp_path, capsys):
    path = tmp_path / "s.sock"
    async with an_agent(path):
        await run("train-0", "--reset", "--socket", path, "-o", "json")

    document = json.loads(capsys.readouterr().out)
    assert (DATA, str(path)) == (document["data"], document["source"])


@pytest.mark.parametrize(("status", "code"), [(409, 1), (503, 1), (404, 4)])
async def test_a_refusal_is_told_and_exits_by_its_kind(tmp_path, capsys, status, code):
    path = tmp_path / "s.sock"
    async with an_agent(path, status=status, raw="GPU 0 is full; end a pod.\n"):
        assert code == await run("train-0", "--reset", "--socket", path)

    assert "hami-agent limit: GPU 0 is full; end a pod.\n" == capsys.readouterr().err


async def test_without_an_agent_it_exits_3(tmp_path):
    assert 3 == await run("train-0", "--reset", "--socket", tmp_path / "none.sock")


@pytest.mark.parametrize("argv", [(), ("--reset", "--cores", "1")])
async def test_limits_and_a_reset_exclude_each_other(tmp_path, capsys, argv):
    assert 2 == await run("train-0", *argv, "--socket", tmp_path / "none.sock")
    assert "give --memory, --cores or both; or --reset alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("a/b/c", "--reset"), "is not [NAMESPACE/]POD"),
        (
            ("a", "--memory", "3000"),
            "'3000' is not an amount of at least 1Mi with its unit, such as",
        ),
        (("a", "--memory", "1Ki"), "is not an amount of at least 1Mi"),
        (("a", "--cores", "101"), "is not a percentage from 0 to 100"),
        (("a", "--cores", "-1"), "cores"),
    ],
)
async def test_what_is_no_amount_is_wrong_usage(tmp_path, capsys, argv, words):
    with pytest.raises(SystemExit) as ended:
        await run(*argv, "--socket", tmp_path / "none.sock")

    assert 2 == ended.value.code
    assert words in capsys.readouterr().err
