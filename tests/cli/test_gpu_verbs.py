"""`recheck` and `release`: what is asked of the agent, what is shown, exit codes."""

import asyncio
import contextlib
import io
import json
import shlex
import tempfile
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


GOOD = RECHECKED | SERVED
TWO_HELD = RELEASED | {"gpus": ["GPU-3", "GPU-4"], "labels": ["3", "4"], "heldBy": ["ml/train-0"]}
STILL_OPEN = RELEASED | {"released": False, "obstacle": "a call has not come back"}
GOLDEN = Path("tests/golden/gpu-verbs.txt")
CASES: dict[str, tuple[str, Mapping[str, Any] | str, int]] = {
    "a bad GPU": ("recheck 3", RECHECKED, 200),
    "a name with a space": ("recheck 'a b'", GOOD, 200),
    "a GPU without an index": ("recheck --was-reset GPU-3", GOOD | {"gpu": None}, 200),
    "all are served": ("recheck all", {"gpus": [GOOD, FOURTH | {"serving": True}]}, 200),
    "one is not served": ("recheck --was-reset all", {"gpus": [GOOD, FOURTH]}, 200),
    "no GPU": ("recheck all", {"gpus": []}, 200),
    "a free GPU": ("release 3", RELEASED, 200),
    "two GPUs that pods hold": ("release all", TWO_HELD, 200),
    "two free GPUs": ("release all", TWO_HELD | {"heldBy": []}, 200),
    "a call is open": ("release 3", STILL_OPEN, 200),
    "a call is open and a pod holds it": ("release 3", STILL_OPEN | {"heldBy": ["ml/x"]}, 200),
    **{
        f"{what}: {verb}": (f"{verb} 9", answer, status)
        for verb in ("recheck", "release")
        for what, answer, status in (
            ("unknown", "There is no GPU 9 here.", 404),
            ("denied", "Only root may do this.", 403),
            ("no answer of an agent", "{}", 200),
            ("no data", '{"data": null}', 200),
            ("nobody", "", 0),
        )
    },
}


async def screen(name: str, path: Path) -> str:
    """What is asked of the agent, and what is shown of its answer."""
    words, given, status = CASES[name]
    raw, data = (given, {}) if isinstance(given, str) else (None, given)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        async with contextlib.AsyncExitStack() as stack:
            asked = list[str]()
            if status:
                asked = await stack.enter_async_context(an_agent(path, "Any", data, status, raw))
            code = await run(words, path)
    shown = f"{out.getvalue()}{err.getvalue()}".replace(str(path), "SOCKET")
    return f"=== {name}: {words}\nasked {', '.join(asked)}\nexit {code}\n{shown}"


def golden() -> str:
    """All screens; each ends where the next begins."""
    return f"{GOLDEN.read_text(encoding='utf-8')}==="


@pytest.mark.parametrize("name", CASES)
async def test_the_answer_is_shown_and_has_its_exit_code(name, tmp_path):
    """`python -m tests.cli.test_gpu_verbs` writes the golden text."""
    assert f"{await screen(name, tmp_path / 's.sock')}===" in golden()


@pytest.mark.parametrize(
    ("verb", "data", "code"), [("recheck", RECHECKED, 1), ("release", RELEASED, 0)]
)
async def test_json_says_where_it_is_from(tmp_path, capsys, verb, data, code):
    path = tmp_path / "s.sock"
    async with an_agent(path, verb.capitalize(), data):
        assert code == await run(f"{verb} 3 -o json", path)

    document = json.loads(capsys.readouterr().out)
    assert (str(path), data) == (document["source"], document["data"])


async def written() -> str:
    with tempfile.TemporaryDirectory() as place:
        return "".join([await screen(name, Path(place, "s.sock")) for name in CASES])


if __name__ == "__main__":
    GOLDEN.write_text(asyncio.run(written()), encoding="utf-8")
