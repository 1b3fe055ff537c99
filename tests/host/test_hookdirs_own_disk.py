"""The file system of its own that the documents advise, made by their own commands."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.host.hook_space import HERE, NO_PRIVILEGES, TOP, said

pytestmark = HERE
HOOK = "/usr/local/vgpu"
BLOCK = re.compile(r"^```\n(mkfs\..*?)^```$", re.MULTILINE | re.DOTALL)
FILL = """
prepare()
written = 0
try:
    with open(hook / "vgpu" / "containers" / NAME / "big", "wb", buffering=0) as file:
        while written < 200:
            file.write(bytes(2**20))
            written += 1
except OSError as error:
    print(error.strerror)
NAME += "-b"
prepare()
print(asyncio.run(dirs.room()).available < 2**20)
print(os.stat(hook / "vgpu").st_dev != os.stat(hook).st_dev)
"""


def documented(document: str) -> str:
    (block,) = BLOCK.findall((TOP / document).read_text())
    return str(block)


def can_loop(image: Path, at: Path) -> bool:
    """Whether a file can be mounted here."""
    at.mkdir()
    made = f"mkfs.ext4 -q {image} && mount {image} {at}"
    words = ["unshare", "--mount", "sh", "-c", made]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0  # noqa: S603


@pytest.mark.parametrize("document", ["deploy/README.md", "systemd/README.md"])
def test_the_documented_file_system_of_its_own_is_all_that_a_container_can_fill(tmp_path, document):
    image, table, hook = tmp_path / "disk", tmp_path / "fstab", tmp_path / "hook"
    for file in (image, table):
        file.touch()
    with image.open("wb") as file:
        file.truncate(48 * 2**20)
    hook.mkdir()
    if not can_loop(image, tmp_path / "tried"):
        pytest.skip("no file can be mounted here")
    image.write_bytes(b"")
    with image.open("wb") as file:
        file.truncate(48 * 2**20)
    commands = documented(document).replace(HOOK, str(hook / "vgpu")).replace("DISK", str(image))
    script = f'mount --bind {table} /etc/fstab\nset -eu\n{commands}\nexec "$@"'

    lines = said(hook, FILL, "sh", "-c", script, "sh", *NO_PRIVILEGES)

    assert ["prepared", "No space left on device"] == lines[:2]
    assert lines[2] == "prepared" or lines[2].endswith("[HA-5003]")
    assert ["True", "True"] == lines[3:]
    assert [] == list((hook / "vgpu").iterdir())
