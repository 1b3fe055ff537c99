"""`hami-agent recheck`: what is asked, what is shown, exit codes."""

import json

import pytest

from agent.cli import recheck
from tests.cli import gpu_agent

pytestmark = pytest.mark.looptime(False)

DATA = {
    "gpu": 3,
    "uuid": "GPU-3",
    "probe": {"outcome": "passed", "text": ""},
    "was": "bad",
    "condition": "bad",
    "since": "2026-09-01T12:00:00+00:00",
    "serving": False,
    "cause": "xid",
    "action": "reset",
    "runbook": "H-048",
    "text": "XID 48: double-bit ECC error [H-048]",
    "missing": ["a reset of the GPU", "2 more passed probes"],
}


def an_agent(path, status=200, raw=None, **changes):
    return gpu_agent.an_agent(path, "Recheck", DATA | changes, status, raw)


async def run(*argv):
    return await gpu_agent.run(recheck, "recheck", *argv)


async def test_a_gpu_that_is_not_served_is_a_problem_and_what_is_missing_is_said(tmp_path, capsys):
    path = tmp_path / "s.sock"
    async with an_agent(path) as agent:
        code = await run("3", "--socket", path)

    assert (1, ["/api/v1/gpus/3:recheck"]) == (code, agent.asked)
    assert (
        "GPU 3 (GPU-3): it answered\n"
        "bad since 2026-09-01T12:00:00+00:00, not served\n"
        "XID 48: double-bit ECC error [H-048]\n"
        "needed: a reset of the GPU\n"
        "needed: 2 more passed probes\n"
    ) == capsys.readouterr().out


async def test_an_operators_word_is_another_action(tmp_path, capsys):
    path = tmp_path / "s.sock"
    async with an_agent(path) as agent:
        await run("3", "--was-reset", "--socket", path)

    assert ["/api/v1/gpus/3:was-reset"] == agent.asked
    assert "GPU 3" in capsys.readouterr().out


async def test_a_gpu_whose_index_is_not_known_is_said_to_have_none(tmp_path, capsys):
    path = tmp_path / "s.sock"
    async with an_agent(path, gpu=None):
        await run("GPU-3", "--socket", path)

    assert "GPU of unknown index (GPU-3): it answered\n" in capsys.readouterr().out


async def test_a_gpu_that_is_served_is_no_problem(tmp_path, capsys):
    path = tmp_path / "s.sock"
    probe = {"outcome": "silent", "text": "no answer within 2 s"}
    async with an_agent(
        path, serving=True, condition="ok", text="", missing=[], probe=probe
    ) as agent:
        code = await run("a b", "--socket", path)

    assert (0, ["/api/v1/gpus/a b:recheck"]) == (code, agent.asked)
    assert (
        "GPU 3 (GPU-3): it did not answer (no answer within 2 s)\n"
        "ok since 2026-09-01T12:00:00+00:00, served\n"
    ) == capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "action", "second", "code"),
    [
        ([], "recheck", {"serving": True}, 0),
        (["--was-reset"], "was-reset", {"serving": False}, 1),
    ],
)
async def test_all_gpus_are_asked_and_each_is_told_of(
    tmp_path, capsys, words, action, second, code
):
    path = tmp_path / "s.sock"
    gpus = [DATA | {"serving": True, "missing": []}, DATA | {"gpu": 4, "uuid": "GPU-4"} | second]
    raw = json.dumps({"apiVersion": "v1", "kind": "RecheckAll", "data": {"gpus": gpus}})
    async with an_agent(path, raw=raw) as agent:
        ended = await run(*words, "all", "--socket", path)

    told = capsys.readouterr().out
    assert (code, [f"/api/v1/gpus/all:{action}"]) == (ended, agent.asked)
    assert "GPU 3 (GPU-3): it answered\n" in told
    assert "GPU 4 (GPU-4): it answered\n" in told
