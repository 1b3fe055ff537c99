"""`recheck` and `release`: what is asked of the agent, what is shown, exit codes."""

import asyncio
import contextlib
import json
import shlex
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiohttp import web

from agent.cli.main import dispatch
from agent.web.server import serve_socket

pytestmark = pytest.mark.looptime(False)

RECHECKED = {
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
SERVED = {
    "serving": True,
    "condition": "ok",
    "text": "",
    "missing": [],
    "probe": {"outcome": "silent", "text": "no answer within 2 s"},
}
FOURTH = RECHECKED | {"gpu": 4, "uuid": "GPU-4", "missing": []}
RELEASED = {"gpus": ["GPU-3"], "labels": ["3"], "heldBy": [], "released": True, "obstacle": ""}


@contextlib.asynccontextmanager
async def an_agent(
    path: Path, kind: str, data: Mapping[str, Any], status: int = 200, raw: str | None = None
) -> AsyncIterator[list[str]]:
    """An agent's socket that answers each POST alike; yields the paths that were asked for."""
    asked: list[str] = []
    text = json.dumps({"apiVersion": "hami-agent/v1", "kind": kind, "data": data})

    async def answer(request: web.BaseRequest) -> web.Response:
        asked.append(request.path)
        return web.Response(status=status, text=text if raw is None else raw)

    with structlog.testing.capture_logs():
        async with serve_socket({}, path, answer):
            yield asked


async def run(words: str, path: Path) -> int:
    return await asyncio.to_thread(dispatch, [*shlex.split(words), "--socket", str(path)], {})


THIRD = """\
GPU 3 (GPU-3): it answered
bad since 2026-09-01T12:00:00+00:00, not served
XID 48: double-bit ECC error [H-048]
needed: a reset of the GPU
needed: 2 more passed probes
"""
SILENT = """\
GPU 3 (GPU-3): it did not answer (no answer within 2 s)
ok since 2026-09-01T12:00:00+00:00, served
"""
OTHER = """
GPU 4 (GPU-4): it answered
bad since 2026-09-01T12:00:00+00:00, {served}
XID 48: double-bit ECC error [H-048]
"""
FREE = "GPU 3: released until `hami-agent recheck 3`\n"
HELD = """\
still held by pod ml/train-0: delete it first
GPUs 3, 4: not free yet, but no new pod gets them; release again later
"""
OPEN = """\
still open in the agent, which can be stopped for the work: a call has not come back
GPU 3: not free yet, but no new pod gets it; release again later
"""
BOTH = "still held by pod ml/train-0: delete it first\n" + OPEN
ALL_FREE = "GPUs 3, 4: released until `hami-agent recheck all`\n"
SERVED_TEXT, NOT_SERVED = (OTHER.format(served=word) for word in ("served", "not served"))
NO_INDEX = SILENT.replace("GPU 3", "GPU of unknown index")
GOOD, NUMBERLESS = RECHECKED | SERVED, RECHECKED | SERVED | {"gpu": None}
BOTH_GOOD, ONE_BAD = ({"gpus": [GOOD, FOURTH | {"serving": is_good}]} for is_good in (True, False))
TWO_HELD = RELEASED | {"gpus": ["GPU-3", "GPU-4"], "labels": ["3", "4"], "heldBy": ["ml/train-0"]}
TWO_FREE = TWO_HELD | {"heldBy": []}
STILL_OPEN = RELEASED | {"released": False, "obstacle": "a call has not come back"}
ANSWERS = [
    ("recheck 3", RECHECKED, "3:recheck", 1, THIRD),
    ("recheck 'a b'", GOOD, "a b:recheck", 0, SILENT),
    ("recheck --was-reset GPU-3", NUMBERLESS, "GPU-3:was-reset", 0, NO_INDEX),
    ("recheck all", BOTH_GOOD, "all:recheck", 0, SILENT + SERVED_TEXT),
    ("recheck --was-reset all", ONE_BAD, "all:was-reset", 1, SILENT + NOT_SERVED),
    ("recheck all", {"gpus": []}, "all:recheck", 1, "this node has no GPU\n"),
    ("release 3", RELEASED, "3:release", 0, FREE),
    ("release all", TWO_HELD, "all:release", 1, HELD),
    ("release all", TWO_FREE, "all:release", 0, ALL_FREE),
    ("release 3", STILL_OPEN, "3:release", 1, OPEN),
    ("release 3", STILL_OPEN | {"heldBy": ["ml/train-0"]}, "3:release", 1, BOTH),
]


@pytest.mark.parametrize(("words", "data", "asked", "code", "shown"), ANSWERS)
async def test_the_answer_is_shown_and_has_its_exit_code(
    tmp_path, capsys, words, data, asked, code, shown
):
    path = tmp_path / "s.sock"
    async with an_agent(path, "Any", data) as paths:
        assert code == await run(words, path)

    assert ([f"/api/v1/gpus/{asked}"], shown) == (paths, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("verb", "data", "code"), [("recheck", RECHECKED, 1), ("release", RELEASED, 0)]
)
async def test_json_says_where_it_is_from(tmp_path, capsys, verb, data, code):
    path = tmp_path / "s.sock"
    async with an_agent(path, verb.capitalize(), data):
        assert code == await run(f"{verb} 3 -o json", path)

    document = json.loads(capsys.readouterr().out)
    assert (str(path), data) == (document["source"], document["data"])


@pytest.mark.parametrize("verb", ["recheck", "release"])
@pytest.mark.parametrize(
    ("status", "raw", "code", "said"),
    [
        (404, "There is no GPU 9 here.", 4, "There is no GPU 9 here."),
        (403, "Only root may do this.", 1, "Only root may do this."),
        (200, "{}", 3, "did not answer as an agent"),
        (200, '{"data": null}', 3, "did not answer as an agent"),
        (None, None, 3, "is the agent running"),
    ],
)
async def test_what_went_wrong_is_said_and_has_its_exit_code(
    tmp_path, capsys, verb, status, raw, code, said
):
    path = tmp_path / "s.sock"
    async with contextlib.AsyncExitStack() as stack:
        if status is not None:
            await stack.enter_async_context(an_agent(path, "Any", {}, status, raw))
        assert code == await run(f"{verb} 9", path)

    error = capsys.readouterr().err
    assert error.startswith(f"hami-agent {verb}: ")
    assert said in error
