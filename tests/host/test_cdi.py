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


def spec(*devices: object, **changes: object) -> bytes:
    given = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": list(devices or (A, B))}
    return json.dumps(given | changes).encode()


CTK = b"""---
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
  name: all
kind: nvidia.com/gpu
"""
"""As nvidia-ctk writes it."""
ALIASES = b"""cdiVersion: 0.5.0
kind: nvidia.com/gpu
x: &e {env: [A=1]}
devices: [{name: GPU-a, containerEdits: *e}, {name: GPU-b, containerEdits: *e}]
"""
HOOKED = A | {"containerEdits": {"env": [], "hooks": [{"hookName": "x", "path": "/x"}]}}
TAKEN = [
    *(spec(), spec(cdiVersion="0.3.0"), spec(cdiVersion="v0.5.0"), spec(cdiVersion="1.2.0")),
    *(spec(annotations={"a": "b"}), spec(later=[{"field": 1}]), spec(containerEdits={})),
    *(spec({**A, "annotations": {"x": "y"}}, B), spec(HOOKED, B)),
    spec(containerEdits={"env": ["B=2"]}),
    json.dumps(json.loads(spec()), indent="\t").encode(),
    spec().replace(b"/", b"\\/"),
    b"# a comment\n" + spec(),
    b"\xef\xbb\xbf" + spec(),
    spec().decode().encode("utf-16"),
    ALIASES,
    spec() + b"\n---\nanother: document\n",
]
MALFORMED = [
    *(b"", b"{", b"\x00", b"\xff\xfe\x00", b"- a\n- b\n", b"text", b"? [a]: b\n"),
    *(b"devices: *unknown\n", spec()[:-20], spec().replace(b"kind", b"kin")),
    *(spec(devices=[]), spec(devices={"a": A}), spec(devices="GPU-a"), spec(devices=None)),
    *(spec(A, {"containerEdits": {"env": ["A=1"]}}), spec(A, None), spec(A, "GPU-b")),
]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (CTK, {"0", "all"}),
        *((given, {"GPU-a", "GPU-b"}) for given in TAKEN),
        *((given, set()) for given in MALFORMED),
    ],
)
def test_a_file_that_a_runtime_takes_defines_its_devices_and_a_malformed_one_nothing(given, names):
    assert {f"nvidia.com/gpu={name}" for name in names} == read_specification(given)


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
        self.directories = list(map(str, directories))
        self.port = CdiDirectories(Inline(), in_pod=in_pod)

    @property
    def defined(self) -> set[str] | None:
        found = asyncio.run(self.port.names(self.directories))
        return None if found is None else {name.partition("=")[2] for name in found}


def test_the_files_of_both_directories_count_whatever_else_lies_there(static, dynamic):
    (dynamic / "deeper").mkdir()
    for place, name in (
        *((static / "a.json", "a"), (dynamic / "b.yaml", "b"), (dynamic / "elsewhere", "h")),
        *((static / "c.yml", "c"), (static / "d.json.tmp", "d"), (dynamic / "deeper/e.json", "e")),
    ):
        place.write_bytes(spec({**A, "name": name}))
    (static / "broken.yaml").write_text("{")
    (dynamic / "f.json").mkdir()
    os.mkfifo(dynamic / "g.json")
    (static / "h.yaml").symlink_to(dynamic / "elsewhere")

    assert {"a", "b", "h"} == Cdi(static, dynamic).defined


def test_each_change_is_seen(static, dynamic):
    cdi, file = Cdi(static, dynamic), dynamic / "a.json"
    steps = [
        (lambda: None, set()),
        (lambda: file.write_bytes(spec(A)), {"GPU-a"}),
        (lambda: file.write_bytes(spec(A, B)), {"GPU-a", "GPU-b"}),
        (lambda: (dynamic / ".new").write_bytes(spec(B)), {"GPU-a", "GPU-b"}),
        (lambda: (dynamic / ".new").rename(file), {"GPU-b"}),
        (lambda: file.rename(static / "a.json"), {"GPU-b"}),
        ((static / "a.json").unlink, set()),
    ]
    for step, defined in steps:
        step()
        assert defined == cdi.defined


def test_a_directory_that_is_missing_defines_nothing_on_the_host_and_is_not_known_in_a_pod(
    tmp_path, static, dynamic
):
    (dynamic / "a.json").write_bytes(spec(A))

    assert {"GPU-a"} == Cdi(tmp_path / "none", dynamic).defined
    assert Cdi(tmp_path / "none", dynamic, in_pod=True).defined is None
    assert {"GPU-a"} == Cdi(static, dynamic, in_pod=True).defined


def test_nothing_is_known_of_what_cannot_be_read_as_a_whole(static, dynamic):
    (dynamic / "a.json").write_bytes(spec(A))
    (static / "b.yaml").symlink_to("/host/only/b.yaml")
    assert Cdi(static, dynamic).defined is None

    (static / "b.yaml").unlink()
    static.rmdir()
    static.touch()
    assert Cdi(static, dynamic).defined is None


def test_nothing_is_known_of_a_mounted_directory_that_the_host_has_removed(static, dynamic):
    """The mount shows the removed one for ever, and the host may have made another one since."""
    opened = os.open(dynamic, os.O_RDONLY | os.O_DIRECTORY)
    seen = Cdi(static, Path(f"/proc/self/fd/{opened}"), in_pod=True)
    assert set() == seen.defined
    dynamic.rmdir()
    dynamic.mkdir()

    assert seen.defined is None
    os.close(opened)
