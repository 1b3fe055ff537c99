"""Command lines and environments that were made for HAMi's plugin: taken, told of, or refused."""

from pathlib import Path

import pytest

from agent.cli.main import dispatch


@pytest.fixture
def device_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HAMi's file in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "device.yaml").write_text("nvidia:\n  deviceMemoryScaling: 1.5\n")


CHART = (
    "--config-file=device.yaml --mig-strategy=none --disable-core-limit=false -v=4 --v=false "
    "--device-id-strategy=uuid --device-discovery-strategy auto --imex-required=false "
    "--pass-device-specs --node-name=n"
)


@pytest.mark.usefixtures("device_config")
def test_a_command_line_of_hamis_chart_is_taken(capsys):
    assert 0 == dispatch(["config", "show", "--diff", *CHART.split()], {})

    out = capsys.readouterr()
    assert [
        "node.name",
        "files.deviceConfig",
        "sharing.memoryScaling",
        "allocation.passDeviceSpecs",
    ] == [line.split()[0] for line in out.out.splitlines()[1:]]
    assert ["hami-agent: warning: -v: has no effect here"] == out.err.splitlines()


def test_a_flag_that_changes_nothing_is_told_as_its_variable_is(capsys):
    words = ["--device-split-count", "3", "--disable-core-limit", "--device-id-strategy=index"]
    words += ["--mig-strategy", "mixed"]
    environ = {"DEVICE_SPLIT_COUNT": "3", "DISABLE_CORE_LIMIT": "true"}
    environ |= {"DEVICE_ID_STRATEGY": "index", "MIG_STRATEGY": "mixed"}

    assert 0 == dispatch(["config", "show", *words], {})
    by_flags = capsys.readouterr().err.splitlines()
    assert 0 == dispatch(["config", "show"], environ)
    by_variables = capsys.readouterr().err.splitlines()

    assert 4 == len(by_flags)
    assert [line.split(": ")[3:] for line in by_flags] == [
        line.split(": ")[3:] for line in by_variables
    ]


@pytest.mark.parametrize(
    ("flag", "variable", "value"),
    [
        ("--imex-required", "IMEX_REQUIRED", "true"),
        ("--device-discovery-strategy", "DEVICE_DISCOVERY_STRATEGY", "tegra"),
    ],
)
def test_what_a_flag_asks_for_and_the_agent_cannot_do_is_refused(
    capsys, flag: str, variable: str, value: str
):
    assert 78 == dispatch(["config", "show", f"{flag}={value}"], {})
    assert f"hami-agent: {flag}: " in (said := capsys.readouterr().err)
    assert f"found '{value}'" in said
    assert 78 == dispatch(["config", "show"], {variable: value})
    assert said.replace(flag, f"env {variable}") == capsys.readouterr().err
