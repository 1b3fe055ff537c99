"""Bad input at the start: one sentence that says where, and the right exit code."""

import _ctypes
import json
import os
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
TOO_LONG = "x" * 300
"""A name of which the system does not even say whether it is there."""


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("splitCount: 4\n  splitCuont: 5", "{}:3:3: unknown setting sharing.splitCuont"),
        ("splitCount: many", "{}:2:15: sharing.splitCount"),
    ],
)
def test_a_wrong_setting_is_78_with_file_and_line(flags, tmp_path, text: str, said: str):
    config = tmp_path / "config.yaml"
    config.write_text(f"sharing:\n  {text}\n")

    code, line = refused(flags | {"--config": str(config)})

    assert 78 == code
    assert said.format(config) in line


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        ({"--kubeconfig": "{}/absent"}, 78, "{}/absent"),
        ({"--kubeconfig": f"{{}}/{TOO_LONG}"}, 78, "cannot be read ([Errno 36]"),
        ({"--simulate": "h1000:8"}, 78, "--simulate h1000:8: there is no profile `h1000`"),
        ({"--state-dir": "{}/occupied"}, 77, "{}/occupied"),
        ({"--run-dir": "{}/occupied"}, 77, "{}/occupied"),
        (
            {"--simulate": "", "--nvml-library": "{}/absent.so", "--on-no-driver": "exit"},
            69,
            "{}/absent.so",
        ),
        (
            {
                "--simulate": "",
                "--nvml-library": f"{{}}/{TOO_LONG}",
                "--on-no-driver": "exit",
            },
            69,
            "correct --nvml-library",
        ),
        (
            {"--simulate": "", "--nvml-library": "{}/pipe.so", "--on-no-driver": "exit"},
            69,
            "{}/pipe.so cannot be loaded as the driver's library (it is a pipe)",
        ),
        *(
            (
                {"--simulate": "", "--nvml-library": f"{{}}/{name}.so", "--on-no-driver": "exit"},
                69,
                f"{{}}/{name}.so cannot be loaded as the driver's library ({why}",
            )
            for name, why in (
                ("short", "its end is missing)"),
                ("shorter", "its end is missing)"),
                ("loop", ""),
                ("foreign", "it is built for another architecture)"),
                ("other", "it has no function nvmlInit_v2)"),
            )
        ),
    ],
    ids=[
        "no kubeconfig",
        "no way to look at the kubeconfig",
        "unknown profile",
        "no state directory",
        "no run directory",
        "no driver",
        "no way to look at the driver",
        "a pipe for a driver",
        "a driver without its end",
        "a driver without its table",
        "a driver that is a link to itself",
        "a driver for another architecture",
        "a library that is no driver's",
    ],
)
def test_what_cannot_be_used_has_its_exit_code_and_is_named(
    flags, tmp_path, changed: dict[str, str], code: int, said: str
):
    (tmp_path / "occupied").write_text("a file")
    os.mkfifo(tmp_path / "pipe.so")
    whole = Path(_ctypes.__file__).read_bytes()  # any library
    (tmp_path / "short.so").write_bytes(whole[:8192])
    (tmp_path / "shorter.so").write_bytes(whole[:100])
    (tmp_path / "loop.so").symlink_to("loop.so")
    (tmp_path / "foreign.so").write_bytes(whole[:18] + b"\xf3\x00" + whole[20:])  # RISC-V
    (tmp_path / "other.so").write_bytes(whole)

    found, line = refused(flags | {key: text.format(tmp_path) for key, text in changed.items()})

    assert code == found
    assert said.format(tmp_path) in line
