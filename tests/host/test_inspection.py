"""Device files, HAMi-core's files and other agents, as this host shows them."""

import datetime as dt
import errno
import hashlib
import importlib.util
import os
import py_compile
import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agent.host import node as surroundings
from agent.host.node import (
    WrittenDirectory,
    device_nodes,
    is_read_only,
    library_file,
    look_at,
    plugin_sockets,
    uncompiled,
    unkept,
    waiting_agents,
)
from agent.host.process import SystemClock, boot_id, host_name, machine_id
from agent.node.preflight import PluginSocket

RUN = Path("/run/hami-agent")


def test_control_files_are_opened_and_those_of_gpus_only_named(tmp_path: Path):
    (tmp_path / "nvidiactl").touch()
    for name in ("nvidia0", "nvidia12", "nvidia-modeset", "null"):
        (tmp_path / name).touch()
    (tmp_path / "nvidia0").chmod(0)  # it is not opened: that would wake the GPU
    seen = {Path(one.path).name: one.error for one in device_nodes(tmp_path)}

    assert {"nvidiactl": 0, "nvidia-uvm": errno.ENOENT, "nvidia0": 0, "nvidia12": 0} == seen


def test_a_control_file_of_another_kind_fails_with_the_systems_words(tmp_path: Path):
    (tmp_path / "nvidiactl").mkdir()
    first, *_ = device_nodes(tmp_path)

    assert errno.EISDIR == first.error


def test_no_directory_is_no_device_file(tmp_path: Path):
    assert [errno.ENOENT] * 2 == [one.error for one in device_nodes(tmp_path / "none")]


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
    assert (tmp_path / "module.py",) == uncompiled([module])

    py_compile.compile(str(tmp_path / "module.py"), doraise=True)

    assert () == uncompiled([module])


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

    assert number == len(uncompiled([module]))


def test_half_of_a_head_is_no_bytecode(tmp_path: Path):
    module = a_module(tmp_path / "module.py")
    py_compile.compile(str(tmp_path / "module.py"), doraise=True)
    (kept,) = (tmp_path / "__pycache__").iterdir()

    kept.write_bytes(kept.read_bytes()[:9])

    assert 1 == len(uncompiled([module]))


def test_modules_without_a_source_need_no_bytecode():
    assert () == uncompiled([sys, ModuleType("made")])


@pytest.mark.parametrize(
    ("environment", "lost"),
    [
        ("A=1\0PYTHONDONTWRITEBYTECODE=1\0", 2),
        ("PYTHONDONTWRITEBYTECODE=\0", 0),
        ("XPYTHONDONTWRITEBYTECODE=1\0", 0),
        (None, None),
    ],
)
def test_the_environment_of_the_agent_decides_whether_it_keeps_bytecode(
    tmp_path: Path, environment: str | None, lost: int | None
):
    (tmp_path / "root").symlink_to("/")
    if environment is not None:
        (tmp_path / "environ").write_text(environment)

    assert lost == unkept([tmp_path / "a.py", tmp_path / "b.py"], tmp_path)


@pytest.mark.skipif(not is_read_only(Path("/proc/sys")), reason="no read-only mount here")
def test_the_mounts_of_the_agent_decide_too(tmp_path: Path):
    (tmp_path / "root").symlink_to("/")
    (tmp_path / "environ").touch()

    assert 1 == unkept([tmp_path / "a.py", Path("/proc/sys/b.py")], tmp_path)


def a_process(root: Path, pid: int, *words: str, status: str = "") -> None:
    (root / str(pid)).mkdir()
    (root / str(pid) / "cmdline").write_bytes("\0".join((*words, "")).encode())
    (root / str(pid) / "status").write_text(status or f"Name:\tx\nNSpid:\t{pid}\n")


@pytest.mark.parametrize(
    ("words", "waits"),
    [
        (("/usr/bin/python3", "-IXfaulthandler", "/usr/bin/hami-agent", "run"), True),
        (("hami-agent", "run", "--run-dir", "/run/hami-agent"), True),
        (("python3", "-m", "agent", "run", "--run-dir=/run/hami-agent"), True),
        (("hami-agent", "run", "--observe"), False),
        (("hami-agent", "doctor"), False),
        (("hami-agent",), False),
        (("vi", "hami-agent"), False),
        (("hami-agent", "run", "--run-dir", "/elsewhere"), False),
    ],
)
def test_an_agent_of_this_run_directory_that_does_not_hold_the_lock_waits(
    words, waits, tmp_path: Path
):
    a_process(tmp_path, 7, "hami-agent", "run")
    a_process(tmp_path, 8, *words)

    assert ((8,) if waits else ()) == waiting_agents(RUN, "pid 7", tmp_path)


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


# Names, paths and sockets of the host are told as they are.


def test_each_kind_of_path_has_its_word(tmp_path: Path):
    (tmp_path / "file").touch(mode=0o640)
    os.mkfifo(tmp_path / "pipe")
    kinds = {name: look_at(tmp_path / name).kind for name in ("", "file", "pipe", "none", "file/x")}

    assert {"": "directory", "file": "file", "pipe": "special file", "none": "", "file/x": ""} == (
        kinds
    )
    assert 0o640 == look_at(tmp_path / "file").mode


def test_what_is_missing_can_be_made_where_the_folder_above_lets_it(tmp_path: Path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "file").touch()
    closed = str(tmp_path / "closed")
    monkeypatch.setattr("os.access", lambda path, _: str(path) != closed)

    makable = {
        name: look_at(tmp_path / name).writable for name in ("a", "a/b/c", "closed/a/b", "file/a")
    }

    assert {"a": True, "a/b/c": True, "closed/a/b": False, "file/a": False} == makable


def test_a_directory_on_a_full_disk_is_told(tmp_path: Path, monkeypatch):
    assert not look_at(tmp_path).full

    def no_room(directory: int, name: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", name)

    monkeypatch.setattr(surroundings, "check_writable", no_room)

    assert look_at(tmp_path).full


def test_a_path_that_cannot_be_looked_at_is_not_taken_for_missing(tmp_path: Path):
    (tmp_path / "loop").symlink_to("loop")

    assert "cannot be looked at" in look_at(tmp_path / "loop").kind


def test_a_socket_without_a_listener_is_dead_and_the_kubelets_is_passed_over(tmp_path: Path):
    names = ("kubelet.sock", "nvidia-gpu.sock", "other.sock")
    kubelet, theirs, other = (socket.socket(socket.AF_UNIX) for _ in names)
    with kubelet, theirs, other:
        for one, name in zip((kubelet, theirs, other), names, strict=True):
            one.bind(str(tmp_path / name))
        other.listen()
        (tmp_path / "checkpoint").touch()

        assert (
            PluginSocket(str(tmp_path / "nvidia-gpu.sock"), alive=False),
            PluginSocket(str(tmp_path / "other.sock"), alive=True),
        ) == plugin_sockets(tmp_path, "kubelet.sock")


def test_a_directory_that_is_not_there_has_no_sockets(tmp_path: Path):
    assert () == plugin_sockets(tmp_path / "none", "kubelet.sock")


def test_the_host_is_named_as_its_kubelet_names_the_node(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: " GPU-Node.Example ")

    assert "gpu-node.example" == host_name()


def test_ids_are_read_without_the_line_end_and_empty_where_they_cannot_be_read(tmp_path):
    (tmp_path / "id").write_text("2f7c7a3e\n")

    assert "2f7c7a3e" == boot_id(tmp_path / "id") == machine_id(tmp_path / "id")
    assert "" == boot_id(tmp_path / "missing") == machine_id(tmp_path)
    assert 36 == len(boot_id())


def test_now_is_in_utc():
    assert dt.timedelta(0) == SystemClock().now().utcoffset()


# A directory is lost when it was removed and what came in its place is seen read-only.


class Mounts:
    """Through which everything is seen read-only, or nothing."""

    read_only = False

    def look(self, directory: Path) -> bool:
        directory.stat()
        return self.read_only


@pytest.fixture
def mounts():
    return Mounts()


@pytest.fixture
def seen(tmp_path, mounts):
    path = tmp_path / "device-plugins"
    path.mkdir()
    return WrittenDirectory(path, mounts.look)


def test_a_directory_that_was_removed_or_made_anew_is_not_lost(seen):
    assert not seen.is_lost()
    seen.path.rmdir()
    assert not seen.is_lost()
    seen.path.mkdir()
    assert not seen.is_lost()


@pytest.mark.parametrize("looks", [0, 1], ids=["right after the start", "later"])
def test_a_removed_directory_with_a_read_only_one_in_its_place_is_lost(looks, seen, mounts):
    assert not any(seen.is_lost() for _ in range(looks))
    seen.path.rmdir()
    mounts.read_only = True
    assert not seen.is_lost()
    seen.path.mkdir()

    assert seen.is_lost()


def test_a_directory_on_a_file_system_that_turned_read_only_is_not_lost(seen, mounts):
    assert not seen.is_lost()
    mounts.read_only = True

    assert not seen.is_lost()


def test_a_directory_that_never_could_be_written_is_not_lost(tmp_path, mounts):
    mounts.read_only = True
    seen = WrittenDirectory(tmp_path / "made", mounts.look)
    seen.path.mkdir()
    assert not seen.is_lost()
    seen.path.rmdir()
    seen.path.mkdir()

    assert not seen.is_lost()


def test_what_the_kernel_says_is_asked(tmp_path):
    assert not is_read_only(tmp_path)
    with pytest.raises(FileNotFoundError):
        is_read_only(tmp_path / "absent")
