"""`hami-agent simulate`: actions, output, exit codes."""

import asyncio
import json
from pathlib import Path

import pytest
import structlog

from agent.cli import sandbox
from agent.cli.main import dispatch
from agent.sandbox.driver import open_simulation

pytestmark = pytest.mark.looptime(False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.sock"


@pytest.fixture
async def hardware(path: Path):
    with structlog.testing.capture_logs():
        async with open_simulation("t4:2", socket_path=path) as driver:
            yield driver


async def run(*argv: str, socket: Path | None = None) -> int:
    """The exit code; with `socket` it is given behind the words."""
    given = ["--socket", str(socket)] if socket else []
    return await asyncio.to_thread(dispatch, ["simulate", *argv, *given], {})


async def test_every_action_says_what_happened(hardware, path, capsys):
    for words in (
        ["xid", "79", "--gpu", "1"],
        ["restore", "--gpu", "1"],
        ["lose", "--gpu", "0"],
        ["refuse", "--gpu", "1"],
        ["remove", "--gpu", "0"],
        ["add", "--profile", "h100"],
        ["hang", "0.01"],
        ["hang", "10ms"],
    ):
        assert 0 == await run(*words, socket=path)
    assert 0 == await run("--socket", str(path), "list")
    said = capsys.readouterr().out.splitlines()

    assert "reported XID 79" in said[0]
    assert [
        "is being restored",
        "is lost",
        "answers no more until it is reset",
        "is unplugged",
        "is plugged in",
    ] == [line.split(") ")[1] for line in said[1:6]]
    assert "the driver answers nothing for 0.01 s" == said[6]


async def test_json_carries_kind_source_and_data(hardware, path, capsys):
    await run("list", "-o", "json", socket=path)
    document = json.loads(capsys.readouterr().out)

    assert ("Simulation", str(path)) == (document["kind"], document["source"])
    assert ["Tesla T4", "Tesla T4"] == [gpu["name"] for gpu in document["data"]["gpus"]]


async def test_an_unknown_gpu_is_exit_4_and_one_sentence(hardware, path, capsys):
    code = await run("lose", "--gpu", "9", socket=path)
    captured = capsys.readouterr()

    assert (4, "") == (code, captured.out)
    assert captured.err.startswith(
        "hami-agent simulate: there is no GPU `9`; the GPUs are: 0 (GPU-"
    )
    assert () == (await hardware.scan()).faults
    assert 1 == captured.err.count("\n")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "broke"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}\n", "is not one of simulated hardware"),
        (None, "did not answer within 0.5 s"),
    ],
)
async def test_nobody_and_a_peer_that_is_no_hardware_are_exit_3(
    path, capsys, monkeypatch, answer, said
):
    monkeypatch.setattr(sandbox, "DEADLINE", 0.5)

    async def babble(reader, writer) -> None:
        await reader.readuntil(b"}")
        if answer is None:
            await reader.read()
        writer.write(answer or b"")
        writer.close()

    assert [3, 3] == [await run("list", socket=path), await run("list")]
    server = await asyncio.start_unix_server(babble, path)
    assert 3 == await run("list", socket=path)
    nobody, by_default, line = capsys.readouterr().err.splitlines()
    assert f"no simulated hardware answers at {path}" in nobody
    assert "at /run/hami-agent/simulate.sock" in by_default
    assert said in line
    server.close()
