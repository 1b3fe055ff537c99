"""Settings of single XIDs: the agent's own list, and the variables of the Go plugins."""

from pathlib import Path

import pytest

from agent.health.xids import XidClass, xid_class
from agent.settings.sections import build
from agent.settings.sources import NodeFacts, Sources
from tests.fakes.settings_files import load


def health(path: Path, environ: dict[str, str] | None = None, text: str = ""):
    file = path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    plan = load(Sources(file, environ or {}, {}))
    return build(plan.resolve(NodeFacts()), host_name="n").health


@pytest.mark.parametrize("written", ["health: {xids: [94=fatal, 79 = application]}\n", None])
def test_the_class_of_an_xid_can_be_set_by_file_and_by_variable(tmp_path, written):
    environ = {} if written else {"HAMI_AGENT_HEALTH_XIDS": "94=fatal,79 = application"}
    found = health(tmp_path, environ, written or "")

    assert {94: XidClass.FATAL, 79: XidClass.APPLICATION} == found.xids
    assert XidClass.FATAL is xid_class(94, found)


def test_the_variables_of_the_plugins_are_read(tmp_path):
    found = health(tmp_path, {"DP_DISABLE_HEALTHCHECKS": "63,74,x", "DP_ENABLE_HEALTHCHECKS": "13"})

    assert not found.switches.off
    assert health(tmp_path, text="health: {disabledXids: all}\n").switches.off
    assert [XidClass.APPLICATION, XidClass.APPLICATION, XidClass.FATAL] == [
        xid_class(number, found) for number in (63, 74, 13)
    ]
