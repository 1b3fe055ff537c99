"""`runbook`: an entry by the id in a message, the list of all ids, and the nearest one to none."""

import re
import tomllib
from pathlib import Path

import pytest

from agent.cli.main import dispatch
from agent.web.runbook import entries

RUNBOOK = Path("RUNBOOK.md").read_text(encoding="utf-8")


def test_an_entry_is_that_of_the_runbook_without_the_marks_of_links(capsys):
    assert 0 == dispatch(["runbook", "HA-2004"], {})

    title, blank, *lines = capsys.readouterr().out.splitlines()
    assert ("HA-2004 Another pod holds the node lock", "") == (title, blank)
    assert lines
    whole = RUNBOOK.partition("### HA-2004")[2].partition("\n#")[0]
    assert all(line in whole for line in lines if "[" not in whole)
    assert not any("](" in text for _, text in entries().values())


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("ha-2004", "HA-2004 "),
        ("[HA-2004]", "HA-2004 "),
        # The class that `health.xids` has, and what the catalogue and the agent tell to do.
        ("79", "H-079 XID 79: the GPU has fallen off the bus; class needs-reset: reboot the node"),
        ("xid 94", "H-094 XID 94: contained memory error; class contained\n\n"),
        ("999", "H-999 XID 999: a driver error; class fatal\n\n"),
        ("h-nnn", "H-NNN "),
        ("P-DRIVER", "P-DRIVER "),
        ("nodefitpod", "NodeUnfitPod, NodeFitPod "),
        ("GpuRecovered", "Events GpuUnhealthy, GpuRecovered, "),
        ("GpuDegraded", "Condition GpuDegraded"),
        ("hamiagentdown", "HamiAgentDown Alert, critical\n\nExit codes, then the log. "),
    ],
)
def test_an_id_is_found_as_messages_and_people_write_it(words, meant, capsys):
    assert 0 == dispatch(["runbook", words], {})
    assert capsys.readouterr().out.startswith(meant)


def test_without_an_id_all_are_listed_a_line_each(capsys):
    assert 0 == dispatch(["runbook"], {})

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(entries())
    assert "HA-4002                            The GPU is bad or lost" in lines


@pytest.fixture
def fresh():
    yield
    entries.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_the_installed_file_comes_before_that_of_the_repository(tmp_path, monkeypatch, capsys):
    (tmp_path / "agent").mkdir()
    monkeypatch.setattr("agent.__file__", str(tmp_path / "agent/__init__.py"))
    for place, title in (("", "of the repository"), ("agent/", "of the package")):
        (tmp_path / f"{place}RUNBOOK.md").write_text(f"## A\n\n### H-LOST Text {title}\n")
        entries.cache_clear()
        assert 0 == dispatch(["runbook", "H-LOST"], {})
        assert f"H-LOST Text {title}\n" == capsys.readouterr().out


def test_the_package_and_what_it_is_built_from_have_the_file():
    wheel = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]

    assert {"RUNBOOK.md": "agent/RUNBOOK.md"} == wheel["wheel"]["force-include"]
    assert "/RUNBOOK.md" in wheel["sdist"]["include"]
    assert " RUNBOOK.md " in Path("deploy/image/Dockerfile").read_text()
    assert " RUNBOOK.md " in Path("deploy/image/context").read_text()


def test_each_alert_has_an_entry_with_what_it_leads_to():
    rules = Path("deploy/chart/hami-agent/files/rules.yaml").read_text(encoding="utf-8")
    alerts = re.findall(r"alert: (\w+)", rules)

    assert "HamiAgentDown" in alerts
    assert set(alerts) <= entries().keys()
    assert "\n## Exit codes\n" in entries()["HamiAgentDown"][1]
    assert "\nHA-5001 The state cannot be written\n" in entries()["HamiAgentStateNotWritable"][1]


def test_each_reason_of_an_event_has_an_entry():
    sources = [path.read_text(encoding="utf-8") for path in Path("agent").rglob("*.py")]
    named = re.compile(r'(?:NodeEvent\(\s*|_EVENT(?:: Final)? = )"([A-Za-z0-9]+)"')
    reasons = {reason for source in sources for reason in named.findall(source)}
    assert {"AllocationRefused", "ConfigRejected", "GpuCordoned"} <= reasons
    assert reasons <= entries().keys()
