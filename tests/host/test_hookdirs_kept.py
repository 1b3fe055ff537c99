"""What the agent has no right to remove, root removes by the two ways that are documented."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.host.hook_space import HERE, NAME, NO_PRIVILEGES, TOP, said

pytestmark = HERE
OTHER = 65534
HOOK = "/usr/local"
RM = re.compile(r"^rm -rf .*$", re.MULTILINE)
CLEANED = re.compile(r"^e .*$", re.MULTILINE)


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    """With a directory that the agent has kept, and one of a container that runs."""
    (tmp_path / "hook").mkdir()
    assert ["prepared"] == said(tmp_path / "hook", "prepare()\n")
    leaf = tmp_path / "hook" / "vgpu" / "containers" / NAME
    (leaf / "shut" / "in").mkdir(parents=True)
    (leaf / "shut" / "in" / "file").write_text("")
    (leaf / "shut" / "link").symlink_to(leaf.parent)
    for path in (leaf, leaf / "shut", leaf / "shut" / "in"):
        os.chown(path, OTHER, OTHER)
        path.chmod(0o700)
    lines = "remove()\nclear()\nprepare()\n"
    assert ["removed", "1 Permission denied", "prepared"] == said(
        tmp_path / "hook", lines, *NO_PRIVILEGES
    )
    (leaf / "a.cache").write_text("")
    return tmp_path / "hook"


def left(hook: Path) -> list[str]:
    """What a look of the agent's leaves."""
    assert ["0 "] == said(hook, "clear()\n", *NO_PRIVILEGES)
    (leaf,) = (hook / "vgpu" / "containers").iterdir()
    return [leaf.name, *(path.name for path in leaf.iterdir())]


def test_the_runbooks_command_removes_what_the_agent_keeps_and_nothing_else(hook):
    found = RM.findall((TOP / "RUNBOOK.md").read_text())
    (command,) = {line for line in found if ".removed-" in line}

    subprocess.run(["sh", "-euc", command.replace(HOOK, str(hook))], check=True)  # noqa: S603, S607

    assert [NAME, "a.cache"] == left(hook)


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="needs systemd's tool")
def test_systemd_removes_what_the_agent_keeps_and_nothing_else(hook, tmp_path):
    ours = (TOP / "systemd" / "hami-agent.tmpfiles.conf").read_text()
    (line,) = CLEANED.findall(ours)
    (tmp_path / "ours.conf").write_text(line.replace(HOOK, str(hook)) + "\n")
    tool = str(shutil.which("systemd-tmpfiles"))

    for step in ("--create", "--clean"):
        subprocess.run([tool, step, tmp_path / "ours.conf"], check=True)  # noqa: S603

    assert [NAME, "a.cache"] == left(hook)
