"""`hami-agent sandbox scheduler` as a person meets it before anything is served."""

import json
from pathlib import Path

import pytest

from agent.cli.main import dispatch
from agent.sandbox.lab.cluster import kubeconfig

VERB = ["sandbox", "scheduler"]
TLS = Path(__file__).parents[1] / "vectors" / "tls"


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A kubeconfig of a server that nobody asks: it is only contacted once the door is open."""
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig("http://127.0.0.1:1", "t"))
    return str(path)


def test_it_explains_itself_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch([*VERB, "--help"], {}) == 0

    out = capsys.readouterr().out
    assert "hami-agent sandbox scheduler" in out
    assert "example: " in out
    assert "(default hami-scheduler)" in " ".join(out.split())


def test_the_sandbox_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["sandbox", "--help"], {}) == 0
    out = capsys.readouterr().out
    assert "scheduler" in out
    assert "example: hami-agent sandbox --gpus 8" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--kubeconfig"),
        (["--kubeconfig", "k", "--listen", "8080"], "8080 is not HOST:PORT"),
        (["--kubeconfig", "k", "--listen", "a:99999"], "a:99999 is not HOST:PORT"),
        (["--kubeconfig", "k", "--node-policy", "best"], "invalid choice: 'best'"),
        (["--kubeconfig", "k", "--gpu-policy", "spread,best"], "spread,best is not one or several"),
        (["--kubeconfig", "k", "--lock-timeout", "5m"], "5m is not a whole number of seconds"),
        (["--kubeconfig", "k", "--kube-qps", "0"], "0 is not a number above 0"),
        (["--kubeconfig", "k", "--kube-qps", "x"], "x is not a number above 0"),
        (["--kubeconfig", "k", "--kube-burst", "0"], "0 is not a whole number (1 to 100000)"),
        (["--kubeconfig", "k", "--tls-cert", "c"], "--tls-cert and --tls-key go together"),
    ],
)
def test_wrong_usage_is_told_and_exits_with_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch([*VERB, *words], {}) == 2
    assert told in capsys.readouterr().err


def test_an_unusable_kubeconfig_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.write_text(json.dumps({"clusters": []}))

    assert dispatch([*VERB, "--kubeconfig", str(missing)], {}) == 1
    assert f"hami-agent sandbox scheduler: {missing}: cannot be read" in capsys.readouterr().err
    assert dispatch([*VERB, "--kubeconfig", str(empty)], {}) == 1
    assert "names no cluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "told"), [("none.key", "No such file"), ("two.key", "KEY_VALUES_MISMATCH")]
)
def test_a_certificate_that_cannot_be_used_is_one_sentence(
    config: str, key: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ["--tls-cert", str(TLS / "one.crt"), "--tls-key", str(TLS / key)]

    assert dispatch([*VERB, "--kubeconfig", config, *pair], {}) == 1

    said = capsys.readouterr().err
    assert f"--tls-key {TLS / key}: cannot be used (" in said
    assert told in said
