"""Settings on a narrow screen and in a pipe: every value and every place is there."""

import io
import json
import os
from pathlib import Path

import pytest

from agent.cli.main import dispatch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_shows_every_value_and_every_place(
    tmp_path, monkeypatch, columns: int
) -> None:
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path / "d")
    file = "a-file-with-quite-a-name.yaml"
    uuids = [f"GPU-{number:032}" for number in range(3)]
    Path(file).write_text(f"sharing:\n  splitCount: 8\n  filterUUIDs: {uuids}\n")
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns, 24)))

    assert 0 == dispatch(["config", "check", file, "--node", "n"], {})
    assert 0 == dispatch(["config", "show", "--origin", "--diff", "--config", file], {})

    lines = screen.getvalue().splitlines()
    assert 2 == sum(line.rstrip().endswith(f"{file}:2:15") for line in lines)
    assert 2 == sum(line.rstrip().endswith(f"{file}:3:16") for line in lines)
    assert 2 == sum(json.dumps(uuids) in line for line in lines)
    assert all(len(line) <= columns for line in lines if uuids[0] not in line)


def test_what_is_piped_has_a_line_for_each_setting_however_long(tmp_path, capsys):
    file = tmp_path / ("long" * 40)
    file.write_text("sharing:\n  splitCount: 8\n")

    assert 0 == dispatch(["config", "check", str(file), "--node", "n"], {})
    assert f"  sharing.splitCount  8      {file}:2:15" in capsys.readouterr().out.splitlines()


def test_a_value_of_several_lines_is_shown_in_one(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text('library: {version: "a\\nb"}\n')

    assert 0 == dispatch(["config", "show", "--diff", "--config", str(file)], {})
    assert 'library.version  "a\\nb"' in capsys.readouterr().out.splitlines()
