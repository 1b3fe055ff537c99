"""The image writer writes OCI layouts: every digest is right, and no byte depends on the day."""

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.peers.lab.image import APPLETS, write_busybox, write_image, write_pause

NAME = "lab.test/tool:1"
PROGRAM = b"\x7fELF and more"


class Image:
    """An image as its reader meets it; a digest that is wrong fails here."""

    def __init__(self, path: Path) -> None:
        with tarfile.open(path) as tar:
            self.entries = {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}
        self.index = json.loads(self.entries["index.json"])
        (self.named,) = self.index["manifests"]
        self.manifest = json.loads(self.blob(self.named))
        self.config = json.loads(self.blob(self.manifest["config"]))
        (layer,) = self.manifest["layers"]
        self.layer = self.blob(layer)
        with tarfile.open(fileobj=io.BytesIO(self.layer)) as tar:
            self.members = {member.name: member for member in tar}
            self.order = tar.getnames()
            self.files = {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}

    def blob(self, descriptor: dict[str, Any]) -> bytes:
        algorithm, digest = descriptor["digest"].split(":")
        content = self.entries[f"blobs/{algorithm}/{digest}"]
        assert digest == hashlib.new(algorithm, content).hexdigest()
        assert descriptor["size"] == len(content)
        return content


@pytest.fixture
def busybox(tmp_path: Path) -> Path:
    path = tmp_path / "busybox"
    path.write_bytes(PROGRAM)
    return path


def image(tmp_path: Path, **given: Any) -> Image:
    path = tmp_path / "image.tar"
    write_image(path, NAME, given.get("files", {}), given.get("links", {}), ["/bin/tool", "-x"])
    return Image(path)


def test_the_layout_leads_to_every_blob_and_to_no_other(tmp_path: Path):
    written = image(tmp_path, files={"bin/tool": PROGRAM})

    assert {"imageLayoutVersion": "1.0.0"} == json.loads(written.entries["oci-layout"])
    assert 3 == sum(name.startswith("blobs/") for name in written.entries)


def test_the_image_has_the_name_that_containerd_reads(tmp_path: Path):
    written = image(tmp_path)

    assert {
        "io.containerd.image.name": NAME,
        "org.opencontainers.image.ref.name": "1",
    } == written.named["annotations"]


def test_the_configuration_names_the_command_and_the_layer(tmp_path: Path):
    written = image(tmp_path)

    assert ["/bin/tool", "-x"] == written.config["config"]["Cmd"]
    digest = hashlib.sha256(written.layer).hexdigest()
    assert [f"sha256:{digest}"] == written.config["rootfs"]["diff_ids"]
    assert "linux" == written.config["os"] == written.named["platform"]["os"]
    assert written.config["architecture"] == written.named["platform"]["architecture"]


def test_files_and_links_stand_where_they_were_put(tmp_path: Path, busybox: Path):
    written = image(
        tmp_path, files={"opt/a/tool": busybox, "etc/x": b"x"}, links={"bin/t": "/opt/a/tool"}
    )

    assert {"opt/a/tool": PROGRAM, "etc/x": b"x"} == written.files
    assert "/opt/a/tool" == written.members["bin/t"].linkname
    assert written.members["bin/t"].issym()


@pytest.mark.parametrize(
    ("content", "mode"), [(PROGRAM, 0o755), (b"#!/bin/sh\n", 0o755), (b"text", 0o644)]
)
def test_what_is_a_program_may_be_run(tmp_path: Path, content: bytes, mode: int):
    written = image(tmp_path, files={"f": content})

    assert mode == written.members["f"].mode


def test_everybody_may_write_to_tmp(tmp_path: Path):
    written = image(tmp_path, files={"tmp/seed": b""})

    assert 0o1777 == written.members["tmp"].mode


def test_a_folder_comes_before_what_is_in_it(tmp_path: Path):
    written = image(tmp_path, files={"a/b/c": b"", "a-b": b""}, links={"a/l": "b"})

    places = written.order
    assert places.index("a") < places.index("a/b") < places.index("a/b/c")
    assert places.index("a") < places.index("a/l")


def test_the_same_content_is_the_same_bytes(tmp_path: Path, busybox: Path):
    one, two = tmp_path / "one.tar", tmp_path / "two.tar"
    write_image(one, NAME, {"b": busybox, "a": b"a"}, {"m": "a", "l": "b"}, [])
    os.utime(busybox, (1, 1))
    busybox.chmod(0o700)
    write_image(two, NAME, {"a": b"a", "b": busybox}, {"l": "b", "m": "a"}, [])

    assert one.read_bytes() == two.read_bytes()


def test_what_is_in_an_image_belongs_to_root_and_to_no_day(tmp_path: Path, busybox: Path):
    written = image(tmp_path, files={"b": busybox}, links={"l": "b"})

    assert {(0, 0, 0)} == {(m.uid, m.gid, m.mtime) for m in written.members.values()}


def test_busybox_stands_behind_every_program(tmp_path: Path, busybox: Path):
    write_busybox(tmp_path / "image.tar", NAME, busybox)
    written = Image(tmp_path / "image.tar")

    assert PROGRAM == written.files["bin/busybox"]
    assert {"busybox"} == {written.members[f"bin/{applet}"].linkname for applet in APPLETS}
    assert written.files["etc/passwd"].startswith(b"root:x:0:0:")


def test_the_pause_image_has_a_command_of_its_own(tmp_path: Path, busybox: Path):
    write_pause(tmp_path / "image.tar", NAME, busybox)

    assert ["/bin/sh", "-c"] == Image(tmp_path / "image.tar").config["config"]["Cmd"][:2]
