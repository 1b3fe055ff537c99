"""CDI specifications, read as container runtimes read them."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from agent.host.node import CdiDirectories, read_specification
from tests.fakes.offload import Inline

A = {"name": "GPU-a", "containerEdits": {"env": ["A=1"]}}
B = {"name": "GPU-b", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia1"}]}}


def spec(*devices: object, **changes: object) -> dict[str, object]:
    given = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": list(devices or (A, B))}
    return given | changes


def names(given: object) -> set[str]:
    text = given if isinstance(given, bytes) else json.dumps(given).encode()
    return {name.removeprefix("nvidia.com/gpu=") for name in read_specification(text)}


YAML = b"""---
cdiVersion: 0.5.0
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void]
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: "0"
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: GPU-00000001-0000-0000-0000-000000000000
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: all
kind: nvidia.com/gpu
"""


ALIASES = b"""cdiVersion: 0.5.0
kind: nvidia.com/gpu
x: &e {env: [A=1]}
devices: [{name: GPU-a, containerEdits: *e}, {name: GPU-b, containerEdits: *e}]
"""


def test_what_nvidia_ctk_writes_is_read():
    assert {"0", "all", "GPU-00000001-0000-0000-0000-000000000000"} == names(YAML)


@pytest.mark.parametrize(
    "given",
    [
        spec(),
        spec(cdiVersion="0.3.0"),
        spec(cdiVersion="v0.5.0"),
        spec(cdiVersion="1.2.0"),
        spec(annotations={"a": "b"}),
        spec(later=[{"field": 1}]),
        spec({**A, "annotations": {"x": "y"}}, B),
        spec(containerEdits={"env": ["B=2"]}),
        spec(containerEdits={}),
        spec({**A, "containerEdits": {"env": [], "hooks": [{"hookName": "x", "path": "/x"}]}}, B),
        json.dumps(spec(), indent="\t").encode(),
        json.dumps(spec()).replace("/", "\\/").encode(),
        b"# a comment\n" + json.dumps(spec()).encode(),
        b"\xef\xbb\xbf" + json.dumps(spec()).encode(),
        json.dumps(spec()).encode("utf-16"),
        ALIASES,
        json.dumps(spec()).encode() + b"\n---\nanother: document\n",
    ],
)
def test_a_file_that_a_runtime_takes_defines_its_devices(given):
    assert {"GPU-a", "GPU-b"} == names(given)


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"{",
        b"\x00",
        b"\xff\xfe\x00",
        b"- a\n- b\n",
        b"text",
        b"? [a]: b\n",
        b"devices: *unknown\n",
        json.dumps(spec()).encode()[:-20],
        {key: value for key, value in spec().items() if key != "kind"},
        spec(devices=[]),
        spec(devices={"a": A}),
        spec(devices="GPU-a"),
        spec(devices=None),
        spec(A, {"containerEdits": {"env": ["A=1"]}}),
        spec(A, None),
        spec(A, "GPU-b"),
    ],
)
def test_a_malformed_file_defines_nothing(given):
    assert set() == names(given)


@pytest.fixture
def static(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    return tmp_path / "etc"


@pytest.fixture
def dynamic(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


class Cdi:
    """The directories of one agent."""

    def __init__(self, *directories: Path, in_pod: bool = False) -> None:
        self.directories = [str(directory) for directory in directories]
        self.port = CdiDirectories(Inline(), in_pod=in_pod)

    @property
    def defined(self) -> set[str] | None:
        found = asyncio.run(self.port.names(self.directories))
        return None if found is None else {name.partition("=")[2] for name in found}


@pytest.fixture
def cdi(static: Path, dynamic: Path) -> Cdi:
    return Cdi(static, dynamic)


def write(path: Path, *devices: object, **changes: object) -> None:
    path.write_text(json.dumps(spec(*devices, **changes)))


def test_the_files_of_both_directories_count_whatever_else_lies_there(cdi, static, dynamic):
    write(static / "a.json", A)
    write(dynamic / "b.yaml", B)
    (static / "broken.yaml").write_text("{")
    write(static / "c.yml", {**A, "name": "GPU-c"})
    write(static / "d.json.tmp", {**A, "name": "GPU-d"})
    (dynamic / "deeper").mkdir()
    write(dynamic / "deeper" / "e.json", {**A, "name": "GPU-e"})
    (dynamic / "f.json").mkdir()
    os.mkfifo(dynamic / "g.json")
    write(dynamic / "elsewhere", {**A, "name": "GPU-h"})
    (static / "h.yaml").symlink_to(dynamic / "elsewhere")

    assert {"GPU-a", "GPU-b", "GPU-h"} == cdi.defined


def test_each_change_is_seen(cdi, static, dynamic):
    assert set() == cdi.defined
    write(dynamic / "a.json", A)
    assert {"GPU-a"} == cdi.defined
    write(dynamic / "a.json", A, B)
    assert {"GPU-a", "GPU-b"} == cdi.defined
    write(dynamic / ".new", B)
    (dynamic / ".new").rename(dynamic / "a.json")
    assert {"GPU-b"} == cdi.defined
    (dynamic / "a.json").rename(static / "a.json")
    assert {"GPU-b"} == cdi.defined
    (static / "a.json").unlink()
    assert set() == cdi.defined


def test_on_the_host_a_directory_that_is_missing_defines_nothing(tmp_path, dynamic):
    cdi = Cdi(tmp_path / "none", dynamic)

    assert set() == cdi.defined
    write(dynamic / "a.json", A)
    assert {"GPU-a"} == cdi.defined


def test_in_a_pod_nothing_is_known_of_one_that_is_not_mounted(tmp_path, static, dynamic):
    write(dynamic / "a.json", A)

    assert Cdi(tmp_path / "none", dynamic, in_pod=True).defined is None
    assert {"GPU-a"} == Cdi(static, dynamic, in_pod=True).defined


@pytest.mark.parametrize("broken", ["file", "link"])
def test_nothing_is_known_of_what_cannot_be_read_as_a_whole(cdi, static, dynamic, broken):
    write(dynamic / "a.json", A)
    if broken == "file":
        static.rmdir()
        static.write_text("")
    if broken == "link":
        (static / "b.yaml").symlink_to("/host/only/b.yaml")

    assert cdi.defined is None


def test_nothing_is_known_of_a_mounted_directory_that_the_host_has_removed(static, dynamic):
    """The mount shows the removed one for ever, and the host may have made another one since."""
    opened = os.open(dynamic, os.O_RDONLY | os.O_DIRECTORY)
    seen = Cdi(static, Path(f"/proc/self/fd/{opened}"), in_pod=True)
    assert set() == seen.defined
    dynamic.rmdir()
    dynamic.mkdir()

    assert seen.defined is None
    os.close(opened)
