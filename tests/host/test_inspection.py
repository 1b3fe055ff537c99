"""Device files, HAMi-core's files and other agents, as this host shows them."""

import hashlib
import importlib.util
import os
import py_compile
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agent.host.node import device_nodes, library_file, uncompiled, waiting_agents
from agent.node.devices import NodeAccess

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
    seen = library_file(file)

    assert (os.geteuid(), 0o640, True) == (seen.owner, seen.mode, seen.ours)
    assert hashlib.sha256(b"text\n").hexdigest() == seen.digest


def test_what_is_no_file_says_so(tmp_path: Path):
    assert "cannot be read: No such file or directory" == library_file(tmp_path / "f").failure
    assert "is not a regular file" == library_file(tmp_path).failure


def a_module(source: Path) -> ModuleType:
    """A module as an import leaves it, but that it was not executed, so nothing was written."""
    source.write_text("WORD = 'module'\n")
    spec = importlib.util.spec_from_file_location("module", source)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


def test_a_module_without_bytecode_is_compiled_at_each_start(tmp_path: Path):
    module = a_module(tmp_path / "module.py")
    assert 1 == uncompiled([module])

    py_compile.compile(str(tmp_path / "module.py"), doraise=True)

    assert 0 == uncompiled([module])


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        (py_compile.PycInvalidationMode.TIMESTAMP, 1),
        (py_compile.PycInvalidationMode.UNCHECKED_HASH, 0),
    ],
)
def test_bytecode_with_the_date_of_another_source_counts_only_if_no_date_is_looked_at(
    mode: py_compile.PycInvalidationMode, number: int, tmp_path: Path
):
    module = a_module(tmp_path / "module.py")
    py_compile.compile(str(tmp_path / "module.py"), doraise=True, invalidation_mode=mode)

    os.utime(tmp_path / "module.py", (0, 0))

    assert number == uncompiled([module])


def test_half_of_a_head_is_no_bytecode(tmp_path: Path):
    module = a_module(tmp_path / "module.py")
    py_compile.compile(str(tmp_path / "module.py"), doraise=True)
    (kept,) = (tmp_path / "__pycache__").iterdir()

    kept.write_bytes(kept.read_bytes()[:9])

    assert 1 == uncompiled([module])


def test_modules_without_a_source_need_no_bytecode():
    assert 0 == uncompiled([sys, ModuleType("made")])


def a_process(root: Path, pid: int, *words: str, status: str = "") -> None:
    (root / str(pid)).mkdir()
    (root / str(pid) / "cmdline").write_bytes("\0".join((*words, "")).encode())
    (root / str(pid) / "status").write_text(status or f"Name:\tx\nNSpid:\t{pid}\n")


@pytest.mark.parametrize(
    "words",
    [
        ("/usr/bin/python3", "-IXfaulthandler", "/usr/bin/hami-agent", "run"),
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
