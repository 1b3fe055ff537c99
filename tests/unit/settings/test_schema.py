"""The settings as the agent's parts receive them: none is left out, each in its own form."""

import pytest

from agent.settings.fields import Effective, Setting
from agent.settings.plan import Given, Text, make_plan
from agent.settings.profiles import NodeFacts
from agent.settings.schema import build


class Watched(dict[str, Setting]):
    """Settings that remember which were asked for."""

    def __init__(self, settings: Effective) -> None:
        super().__init__(settings)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Setting:
        self.asked.add(key)
        return super().__getitem__(key)


def settings_of(text: str) -> Effective:
    given = Given(own=Text("c.yaml", text.encode()))
    return make_plan(given).resolve(NodeFacts()).settings


def test_there_is_no_setting_that_changes_nothing() -> None:
    watched = Watched(settings_of("scheduler: none"))

    build(watched, host_name="n")

    assert {"files.deviceConfig", "files.nodeConfig"} == watched.keys() - watched.asked


@pytest.mark.parametrize(("written", "value"), [("3", "3"), ("'3'", "3"), ("''", ""), ("-1", "-1")])
def test_a_log_level_is_a_number_or_a_text(written: str, value: str) -> None:
    settings = settings_of(f"library: {{cudaLogLevel: {written}}}")

    assert value == build(settings, host_name="n").edits.cuda_log_level
