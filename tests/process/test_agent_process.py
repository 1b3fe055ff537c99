"""The real process: signals, restarts, a second instance."""

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agent.sandbox.lab.cluster import RESOURCE, fetch, open_cluster
from agent.sandbox.scenario.facts import is_running, ledger_on_disk
from agent.sandbox.scenario.stage import Wish, Workload
from tests.fakes.kubeworld import KUBECONFIG
from tests.process.agent_process import (
    ENVIRON,
    PATIENCE,
    ROOT,
    comes,
    copied_settings,
    offers,
    options,
    run,
    started,
)

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up a capability")
pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(90)]


async def test_a_second_instance_stands_by_and_takes_over():
    async with open_cluster(options()) as opened:
        cluster = await started(opened)
        first = cluster.agent
        await cluster.start_agent()
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        page = await fetch(cluster.web_address or "", "/readyz")
        assert 503 == page.status
        assert f"standby: another agent runs on this host (pid {first.pid}" in page.text
        assert 200 == (await fetch(cluster.web_address or "", "/readyz?standby")).status
        assert 1 == len(cluster.kubelet.history.of("registered"))

        assert 0 == await first.stop()

        assert await cluster.until(
            lambda: len(cluster.kubelet.history.of("registered")) == 2, PATIENCE
        )
        assert await offers(cluster, 80)
        assert cluster.agent.code is None


async def test_a_standby_that_could_not_take_over_says_so_at_once():
    async with open_cluster(options()) as opened:
        cluster = await started(opened)
        first = cluster.agent
        cluster.places.kubeconfig.rename(cluster.places.kubeconfig.with_suffix(".away"))
        second = await cluster.start_agent()

        assert await cluster.until(lambda: second.code is not None, PATIENCE)

        assert 78 == second.code
        (line,) = cluster.log.of("agent.failed", second.pid)
        assert str(cluster.places.kubeconfig) in str(line.fields["err"])
        assert first.code is None
        assert 80 == cluster.allocatable()


async def test_settings_are_followed_and_the_last_good_ones_start_the_next_agent():
    async with open_cluster(options(gpus=1)) as opened:
        config = opened.places.config
        config.write_text("sharing: {splitCount: 4}")
        cluster = await started(opened, slices=4)
        config.write_text("sharing: {splitCount: 6}")
        cluster.agent.signal(signal.SIGHUP)
        assert await offers(cluster, 6), cluster.log.last(20)
        assert 1 == len(cluster.kubelet.history.of("registered"))

        def is_copied() -> bool:
            copy = copied_settings(cluster)
            return copy is not None and copy.own is not None and b"6" in copy.own.content

        assert await comes(is_copied)
        assert 0 == await cluster.agent.stop()
        assert {"kubelet.sock"} == {path.name for path in cluster.places.plugins.glob("*.sock")}
        assert ["agent.stopped"] == [line.event for line in cluster.log.lines if line.event][-1:]
        config.write_text("sharing: {splitCuont: 6}")
        await started(cluster, slices=6)
        (line,) = cluster.log.of("config.rejected")
        assert f"{config}:1:" in str(line.fields)


@NEEDS_ROOT
async def test_on_a_state_disk_that_takes_nothing_rows_are_kept_and_slices_come_back_with_room():
    async with open_cluster(options(gpus=1)) as opened:
        cluster = await started(opened, slices=10)
        cluster.submit(Workload("first", "", (Wish("main", 1, 512),)).pod())
        assert await cluster.until(lambda: is_running(cluster, "first"), PATIENCE)
        (row,) = ledger_on_disk(cluster).rows
        cluster.places.state.chmod(0o500)  # no capability helps the agent's root
        await cluster.agent.kill()
        pid = (await cluster.start_agent()).pid
        assert await cluster.until(lambda: bool(cluster.log.of("list.changed", pid)), PATIENCE)
        assert row.key in {one.key for one in ledger_on_disk(cluster).rows}
        assert [0] == [line.fields["healthy"] for line in cluster.log.of("list.changed", pid)]
        assert await offers(cluster, 0)
        cluster.places.state.chmod(0o750)

        assert await offers(cluster, 10)
        cluster.submit(Workload("later", "", (Wish("main", 1, 512),)).pod())
        assert await cluster.until(lambda: is_running(cluster, "later"), PATIENCE)
        assert 2 == len(ledger_on_disk(cluster).rows)


# Bad input at the start: one sentence that says where, and the right exit code.

NO_DRIVER = {"--simulate": "", "--nvml-library": "{}/absent.so", "--on-no-driver": "exit"}
TOO_LONG = "x" * 300
"""A name of which the system does not even say whether it is there."""


def refused(top: Path, changed: dict[str, str]) -> tuple[int, str]:
    """The exit code of an agent that would run but for what is changed, and why, in one line."""
    kubeconfig = KUBECONFIG.format(server="http://127.0.0.1:9", token="none")  # noqa: S106 -- a test
    (top / "kubeconfig").write_text(kubeconfig)
    (top / "hook").mkdir()
    names = ("kubeconfig", "state-dir", "run-dir", "hook-path", "kubelet-socket", "config")
    flags = {"--kubeconfig": f"{top}/kubeconfig", "--simulate": "h100:1", "--node-name": "here"}
    flags |= {f"--{name}": f"{top}/{name.partition('-')[0]}" for name in names}
    flags |= {"--web-port": "0", "--log-format": "json"} | changed
    ended = run("run", *(word for flag in flags.items() for word in flag))

    assert ("", False) == (ended.stdout, "Traceback" in ended.stderr)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    events = [json.loads(line) for line in ended.stderr.splitlines() if line not in lines]
    lines += [str(one["err"]) for one in events if one["event"] == "agent.failed"]
    (line,) = lines
    return ended.returncode, line


@pytest.mark.parametrize(
    ("setting", "changed", "code", "said"),
    [
        (
            "splitCount: 4\n  splitCuont: 5",
            {},
            78,
            "{}/config:3:3: sharing.splitCuont cannot be set",
        ),
        ("splitCount: many", {}, 78, "{}/config:2:15: sharing.splitCount"),
        ("", {"--kubeconfig": f"{{}}/{TOO_LONG}"}, 78, "cannot be read (File name too long)"),
        ("", {"--simulate": "h1000:8"}, 78, "--simulate h1000:8: there is no profile `h1000`"),
        ("", {"--state-dir": "{}/occupied"}, 77, "{}/occupied"),
        ("", {"--run-dir": "{}/occupied"}, 77, "{}/occupied"),
        ("", NO_DRIVER, 69, "{}/absent.so"),
    ],
)
def test_what_cannot_be_used_has_its_exit_code_and_is_named(tmp_path, setting, changed, code, said):
    (tmp_path / "occupied").touch()
    (tmp_path / "config").write_text(f"sharing:\n  {setting}\n" if setting else "")

    changed = {key: text.format(tmp_path) for key, text in changed.items()}
    found, line = refused(tmp_path, changed)

    assert (code, True) == (found, said.format(tmp_path) in line)


# Doors in whose way something lies: each opens by itself, as soon as it can.


async def test_who_squats_the_port_keeps_nobody_from_the_socket_and_is_told():
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        async with open_cluster(dataclasses.replace(options(), web_port=port)) as cluster:
            await cluster.start_agent()
            path = cluster.places.run / "api.sock"
            assert await cluster.until(path.is_socket, PATIENCE), cluster.log.last(20)

            await until_told(f"[!]web degraded: 127.0.0.1:{port} cannot be bound", path)
            # The page says so first.
            assert await cluster.until(lambda: bool(cluster.log.of("service.failed")), PATIENCE)
            assert {"web"} == {one.fields["service"] for one in cluster.log.of("service.failed")}
            assert await cluster.until(lambda: cluster.kubelet.capacity(RESOURCE) == 80, PATIENCE)

            squatter.close()
            await until_told("[+]web ok", path)
            assert cluster.web_address is not None


async def until_told(text: str, path: Path) -> None:
    """The page of the socket says so: a page tells nobody that it changed."""
    async with asyncio.timeout(PATIENCE):
        said = b""
        while text.encode() not in said:
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"GET /readyz?verbose HTTP/1.0\r\nHost: agent\r\n\r\n")
            said = await reader.read()
            writer.close()


# Processes whose parent closed, filled up or ignored something: an answer, or a sentence.

UNWRITTEN = "hami-agent: standard output cannot be written: "
AGENT = f"{sys.executable} -m agent"


def shell(line: str, **environ: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a line of bash."""
    ended = subprocess.run(  # noqa: S603 -- our own interpreter and arguments
        ["/bin/bash", "-c", line],
        cwd=ROOT,
        env=ENVIRON | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("words", "unbuffered"), [("version", ""), ("config check", "1"), ("--help", "")]
)
@pytest.mark.parametrize(
    ("where", "why"), [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
)
def test_an_answer_that_cannot_be_written_is_one_sentence_and_no_success(
    words: str, where: str, why: str, unbuffered: str
):
    found = shell(f"{AGENT} {words} {where}", PYTHONUNBUFFERED=unbuffered)

    assert (74, "", f"{UNWRITTEN}{why}\n") == found


def test_a_reader_that_has_read_enough_is_no_error():
    code, _, said = shell(f"{AGENT} config schema | true; exit ${{PIPESTATUS[0]}}")

    assert (128 + signal.SIGPIPE, "") == (code, said)


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", "<&- 2>&-"])
def test_messages_that_cannot_be_written_change_no_exit_code(where: str):
    assert 78 == shell(f"{AGENT} run --split-count none {where}")[0]
    assert 2 == shell(f"{AGENT} decode {where}")[0]
    code, answer, _ = shell(f"{AGENT} version {where}")
    assert (0, "hami-agent ") == (code, answer[:11])


def test_a_file_is_checked_from_standard_input():
    line = f"echo 'sharing: {{splitCount: 4}}' | {AGENT} config check /dev/stdin"

    code, answer, said = shell(line)

    assert (0, "") == (code, said)
    assert "  sharing.splitCount  4      /dev/stdin:1:23" in answer.splitlines()


# What the agent knows to log in with is told nowhere.


PAGES = "/ /api/v1/status /api/v1/settings /readyz?verbose /metrics /nothing"


async def test_no_token_is_in_a_log_line_or_a_page():
    def log() -> str:
        return "\n".join(line.text for line in opened.log.lines)

    async with open_cluster(options("--log-level", "debug")) as opened:
        text = opened.places.kubeconfig.read_text()
        token = json.loads(text)["users"][0]["user"]["token"]
        assert len(token) > 8
        cluster = await started(opened)
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        address = cluster.web_address or ""
        pages = [(await fetch(address, path)).text for path in PAGES.split()]
        # A server that takes the token no more is told of, with the address and without the token.
        cluster.places.kubeconfig.write_text(text.replace(token, f"{token}-and-more"))
        await cluster.agent.kill()
        await cluster.start_agent()
        assert await cluster.until(lambda: "answered 401" in log(), PATIENCE)
        code = await cluster.agent.stop()

    assert 0 == code
    assert [] == [page for page in (log(), *pages) if token in page]


@NEEDS_ROOT
async def test_the_agent_is_root_without_capabilities_as_the_unit_and_the_daemonset_run_it():
    async with open_cluster(options(gpus=1)) as cluster:
        await started(cluster, slices=10)
        status = await asyncio.to_thread(Path(f"/proc/{cluster.agent.pid}/status").read_text)

    said = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {"0" * 16} == {said[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    assert ("1", "0\t0\t0\t0") == (said["NoNewPrivs"], said["Uid"])


@NEEDS_ROOT
async def test_another_user_of_the_node_reads_no_secret_and_changes_nothing():
    async with open_cluster(options(gpus=1)) as cluster:
        await started(cluster, slices=10)
        cluster.submit(Workload("one", "", (Wish("main", 1, 512),)).pod())
        assert await cluster.until(lambda: is_running(cluster, "one"), PATIENCE)
        assert await comes(lambda: copied_settings(cluster) is not None)
        places = cluster.places
        own = [*places.state.rglob("*"), *places.run.rglob("*"), *places.plugins.glob("hami*")]
        open_to_all = {path for path in own if path.lstat().st_mode & 0o007}
        leaves = {path for path in places.hook.rglob("*") if path.lstat().st_mode & 0o022}
        owners = {path.lstat().st_uid for path in (*own, *places.hook.rglob("*"))}

    assert {"state.json", "settings.json", "lock", "api.sock"} <= {path.name for path in own}
    assert (set(), {0}) == (open_to_all, owners)
    assert [places.hook / "vgpu" / "containers"] == [leaf.parent for leaf in leaves]
