"""Device files, HAMi-core's files and other agents, as this host shows them."""

import hashlib
import os
from pathlib import Path

import pytest

from agent.core.node.device_access import NodeAccess
from agent.host.inspection import device_nodes, library_file, waiting_agents

RUN = Path("/run/hami-agent")


def test_control_files_are_opened_and_those_of_gpus_only_named(tmp_path: Path):
    (tmp_path / "nvidiactl").touch()
    for name in ("nvidia0", "nvidia12", "nvidia-modeset", "null"):
        (tmp_path / name).touch()
    seen = {Path(one.path).name: one.access for one in device_nodes(tmp_path)}

    assert {
        "nvidiactl": NodeAccess.OPEN,
        "nvidia-uvm": NodeAccess.MISSING,
        "nvidia0": NodeAccess.SEEN,
        "nvidia12": NodeAccess.SEEN,
    } == seen


def test_a_control_file_of_another_kind_fails_with_the_systems_words(tmp_path: Path):
    (tmp_path / "nvidiactl").mkdir()
    first, *_ = device_nodes(tmp_path)

    assert (NodeAccess.FAILED, os.strerror(21)) == (first.access, first.reason)


def test_no_directory_is_no_device_file(tmp_path: Path):
    assert [NodeAccess.MISSING] * 2 == [one.access for one in device_nodes(tmp_path / "none")]


def test_a_file_has_owner_mode_and_digest(tmp_path: Path):
    file = tmp_path / "f"
    file.write_bytes(b"text\n")
    file.chmod(0o640)
    seen = library_file(file, text=True)

    assert (os.geteuid(), 0o640, True) == (seen.owner, seen.mode, seen.ours)
    assert hashlib.sha256(b"text\n").hexdigest() == seen.digest
    assert "text\n" == seen.text
    assert "" == library_file(file).text


def test_what_is_no_file_says_so(tmp_path: Path):
    assert "cannot be read: No such file or directory" == library_file(tmp_path / "f").failure
    assert "is not a regular file" == library_file(tmp_path).failure


def a_process(root: Path, pid: int, *words: str, status: str = "") -> None:
    (root / str(pid)).mkdir()
    (root / str(pid) / "cmdline").write_bytes("\0".join((*words, "")).encode())
    (root / str(pid) / "status").write_text(status or f"Name:\tx\nNSpid:\t{pid}\n")


@pytest.mark.parametrize(
    "words",
    [
        ("/usr/bin/python3", "/usr/bin/hami-agent", "run"),
        ("hami-agent", "run", "--run-dir", "/run/hami-agent"),
        ("python3", "-m", "agent", "run", "--run-dir=/run/hami-agent"),
    ],
)
def test_an_agent_that_does_not_hold_the_lock_waits(words, tmp_path: Path):
    a_process(tmp_path, 7, "hami-agent", "run")
    a_process(tmp_path, 8, *words)

    assert (8,) == waiting_agents(RUN, "pid 7", tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ("hami-agent", "run", "--observe"),
        ("hami-agent", "doctor"),
        ("hami-agent",),
        ("vi", "hami-agent"),
        ("hami-agent", "run", "--run-dir", "/elsewhere"),
    ],
)
def test_other_programs_are_no_agents_of_this_run_directory(words, tmp_path: Path):
    a_process(tmp_path, 7, "hami-agent", "run")
    a_process(tmp_path, 8, *words)

    assert () == waiting_agents(RUN, "pid 7", tmp_path)


def test_an_agent_without_the_flag_has_the_default_directory(tmp_path: Path):
    a_process(tmp_path, 7, "hami-agent", "run", "--run-dir", "/other")
    a_process(tmp_path, 8, "hami-agent", "run")

    assert () == waiting_agents(Path("/other"), "pid 7", tmp_path)


def test_a_holder_in_a_container_is_known_by_its_number_there(tmp_path: Path):
    a_process(tmp_path, 4711, "hami-agent", "run", status="NSpid:\t4711\t1\n")
    a_process(tmp_path, 4712, "hami-agent", "run", status="Name:\tx\n")

    assert (4712,) == waiting_agents(RUN, "pid 1", tmp_path)


def test_a_holder_that_is_not_seen_accuses_nobody(tmp_path: Path):
    a_process(tmp_path, 8, "hami-agent", "run")
    (tmp_path / "9").mkdir()  # it ended meanwhile
    (tmp_path / "self").mkdir()

    assert () == waiting_agents(RUN, "pid 7", tmp_path)
