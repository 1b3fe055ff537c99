"""Settings files of a test, and `config check` of them."""

from pathlib import Path

import pytest

from agent.cli.main import dispatch


def checked(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert code == dispatch(["config", "check", *words], {"HAMI_AGENT_XYZ": "not looked at"})
    out = capsys.readouterr()
    assert "--json" in words or all(len(line) <= 80 for line in out.out.splitlines())
    return out.out, out.err


def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> list[str]:
    monkeypatch.chdir(tmp_path)
    for name, text in texts.items():
        Path(name).write_text(text)
    return list(texts)
