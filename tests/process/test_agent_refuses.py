"""Bad input at the start: one sentence that says where, and the right exit code."""

import json
from pathlib import Path

import pytest

from tests.process.agent_process import run

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

KUBECONFIG = {
    "clusters": [{"name": "here", "cluster": {"server": "http://127.0.0.1:9"}}],
    "users": [{"name": "me", "user": {"token": "none"}}],
    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
    "current-context": "here",
}


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, str]:
    """Flags of an agent that would run, but for what a test changes."""
    (tmp_path / "kubeconfig").write_text(json.dumps(KUBECONFIG))
    (tmp_path / "hook").mkdir()
    return {
        "--node-name": "here",
        "--kubeconfig": str(tmp_path / "kubeconfig"),
        "--simulate": "h100:1",
        "--state-dir": str(tmp_path / "state"),
        "--run-dir": str(tmp_path / "run"),
        "--hook-path": str(tmp_path / "hook"),
        "--kubelet-socket": str(tmp_path / "plugins" / "kubelet.sock"),
        "--pod-resources-socket": str(tmp_path / "pod-resources.sock"),
        "--web-port": "0",
        "--log-format": "json",
    }


def refused(flags: dict[str, str]) -> tuple[int, str]:
    """The exit code, and the one line that says why."""
    ended = run("run", *(word for flag in flags.items() for word in flag))
    assert "" == ended.stdout
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    lines += [
        str(said["err"])
        for said in map(json.loads, set(ended.stderr.splitlines()) - set(lines))
        if said["event"] == "agent.failed"
    ]
    (line,) = lines
    return ended.returncode, line


def test_an_unknown_setting_is_78_with_file_and_line(flags, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("sharing:\n  splitCount: 4\n  splitCuont: 5\n")

    code, line = refused(flags | {"--config": str(config)})

    assert 78 == code
    assert f"{config}:3:" in line
    assert "sharing.splitCuont" in line


def test_a_wrong_type_is_78_with_file_and_line(flags, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("sharing:\n  splitCount: many\n")

    code, line = refused(flags | {"--config": str(config)})

    assert 78 == code
    assert f"{config}:2:15: sharing.splitCount" in line


def test_a_missing_kubeconfig_is_78_with_its_path(flags, tmp_path):
    absent = str(tmp_path / "absent")

    code, line = refused(flags | {"--kubeconfig": absent})

    assert 78 == code
    assert absent in line


def test_an_unknown_profile_is_78(flags):
    code, line = refused(flags | {"--simulate": "h1000:8"})

    assert 78 == code
    assert "--simulate h1000:8: there is no profile `h1000`" in line


def test_a_state_directory_that_cannot_be_one_is_77_with_its_path(flags, tmp_path):
    occupied = tmp_path / "occupied"
    occupied.write_text("a file")

    code, line = refused(flags | {"--state-dir": str(occupied)})

    assert 77 == code
    assert str(occupied) in line


def test_a_run_directory_that_cannot_be_one_is_77_with_its_path(flags, tmp_path):
    occupied = tmp_path / "occupied"
    occupied.write_text("a file")

    code, line = refused(flags | {"--run-dir": str(occupied)})

    assert 77 == code
    assert str(occupied) in line


def test_a_missing_driver_is_69_where_it_is_to_exit(flags, tmp_path):
    absent = str(tmp_path / "libnvidia-ml.so.1")

    code, line = refused(
        flags | {"--simulate": "", "--nvml-library": absent, "--on-no-driver": "exit"}
    )

    assert 69 == code
    assert absent in line
