"""A release is whole, the same from the same commit, of one version, and its parts work."""

import hashlib
import json
import os
import platform
import subprocess
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

from agent import __version__
from tests.image.lab.archive import opened

ROOT = Path(__file__).resolve().parents[2]
NAME = f"hami-agent-{__version__}"
VALUES = ("--set=image.repository=hami-agent", "--kube-version=1.36.3")
MACHINE = platform.machine()
PYTHON = f"hami_agent-{__version__}"
FILES = {
    *(f"{PYTHON}-py3-none-any.whl", f"{PYTHON}.tar.gz", f"{NAME}.lock.txt"),
    *(f"{NAME}.tgz", f"{NAME}-manifests.tar.gz"),
    *(f"{NAME}-{MACHINE}.{end}" for end in ("oci.tar", "cdx.json", "values.yaml")),
}


def sums(folder: Path) -> dict[str, str]:
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


def names(archive: Path) -> set[str]:
    with tarfile.open(archive) as files:
        return {member.name for member in files.getmembers() if member.isfile()}


def text(archive: Path, name: str) -> str:
    with tarfile.open(archive) as files:
        member = files.extractfile(name)
        assert member is not None
        return member.read().decode()


def test_it_has_these_files_and_a_sum_of_each(release):
    assert {*FILES, "SHA256SUMS"} == {path.name for path in release.iterdir()}
    assert sums(release) == {
        name: hashlib.sha256((release / name).read_bytes()).hexdigest() for name in FILES
    }


def test_built_again_it_is_the_same(release, tmp_path):
    again = tmp_path / "release"
    subprocess.run(  # noqa: S603 -- our own program
        [ROOT / "deploy/release", again, ROOT / "build/image/small"],
        check=True,
        capture_output=True,
        umask=0o077,
    )

    assert sums(release) == sums(again)


def test_every_part_has_its_version(release):
    with zipfile.ZipFile(release / f"{PYTHON}-py3-none-any.whl") as wheel:
        of_wheel = wheel.read(f"{PYTHON}.dist-info/METADATA").decode()
    described = [of_wheel, text(release / f"{PYTHON}.tar.gz", f"{PYTHON}/PKG-INFO")]
    chart = yaml.safe_load(text(release / f"{NAME}.tgz", "hami-agent/Chart.yaml"))
    image = opened(release / f"{NAME}-{MACHINE}.oci.tar")
    contents = json.loads((release / f"{NAME}-{MACHINE}.cdx.json").read_text())

    assert [__version__] * 2 == [message_from_string(one)["Version"] for one in described]
    assert (__version__, __version__) == (chart["version"], chart["appVersion"])
    assert __version__ == image.config["Labels"]["org.opencontainers.image.version"]
    assert ("hami-agent", __version__) in {
        (part["name"], part.get("version")) for part in contents["components"]
    }


def test_the_changelog_says_what_this_version_is():
    assert f"\n## [{__version__}] - " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    "name",
    [
        *("pyproject.toml", "README.md", "GUIDE.md", "RUNBOOK.md", "LICENSE", "CHANGELOG.md"),
        "agent/__main__.py",
        *("systemd/install", "systemd/hami-agent.service", "protos/deviceplugin.proto"),
        *("deploy/chart/hami-agent/values.yaml", "deploy/manifests/daemonset.yaml"),
    ],
)
def test_the_source_archive_has_what_is_installed_from(release, name):
    assert (ROOT / name).read_text() == text(release / f"{PYTHON}.tar.gz", f"{PYTHON}/{name}")


@pytest.mark.parametrize("archive", [f"{PYTHON}.tar.gz", f"{NAME}.tgz", f"{NAME}-manifests.tar.gz"])
def test_nothing_compiled_and_nothing_of_this_machine_is_in_an_archive(release, archive):
    with tarfile.open(release / archive) as files:
        members = files.getmembers()

    assert not [one.name for one in members if "__pycache__" in one.name or one.name[0] == "/"]
    assert {(0, 0)} == {(one.uid, one.gid) for one in members}
    assert 1 == len({one.mtime for one in members})


def test_the_locked_dependencies_have_hashes(release):
    locked = (release / f"{NAME}.lock.txt").read_text().replace("\\\n", "").splitlines()

    assert len(locked) > 20
    assert [] == [line for line in locked if "==" not in line or "--hash=sha256:" not in line]


def test_the_manifests_are_those_of_the_repository(release):
    archive = release / f"{NAME}-manifests.tar.gz"
    expected = {f"manifests/{path.name}" for path in (ROOT / "deploy/manifests").iterdir()}

    assert expected | {"doctor.yaml"} == names(archive)
    for name in expected:
        assert (ROOT / "deploy" / name).read_text() == text(archive, name)


def said(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 -- ours
    return done.stdout


def rendered(chart: Path, *more: str) -> str:
    helm = os.environ["HAMI_CHART_TOOLS"] + "/helm"  # noqa: TID251 -- said by who runs it
    return said(helm, "template", "hami-agent", str(chart), *VALUES, *more)


def test_the_packed_chart_renders_what_the_folder_renders(release):
    packed = rendered(release / f"{NAME}.tgz")

    assert "kind: DaemonSet" in packed
    assert rendered(ROOT / "deploy/chart/hami-agent") == packed


def test_the_packed_chart_takes_the_values_of_the_version_before(release):
    former = said(f"{ROOT}/tests/systemd/former").strip()
    if not former:
        pytest.skip("this clone has no version before: git fetch --unshallow")

    values = f"--values={former}/values.yaml"
    assert "kind: DaemonSet" in rendered(release / f"{NAME}.tgz", values)


def test_the_image_runs_and_is_the_one_that_was_built_twice(release, bundle):
    digest = opened(release / f"{NAME}-{MACHINE}.oci.tar").digest
    facts = json.loads((ROOT / "build/image/small/facts.json").read_text())
    version = bundle.run("version", "-o", "json")
    by_digest = rendered(
        release / f"{NAME}.tgz",
        f"--values={release / f'{NAME}-{MACHINE}.values.yaml'}",
        *(f"--set=library.image.digest={digest}", "--set=requireDigests=true"),
    )

    assert facts["digest"] == digest
    assert f"image: hami-agent@{digest}\n" in by_digest
    assert (0, "") == (version.returncode, version.stderr)
    assert __version__ == json.loads(version.stdout)["data"]["version"]
