"""The chart has the version of the agent, and its schema knows every setting and value."""

import json
from pathlib import Path

import yaml

from agent import __version__
from agent.settings.schema import FIELDS
from deploy import render
from tests.shape import tree

CHART = yaml.safe_load(tree.text("deploy/chart/hami-agent/Chart.yaml"))
SCHEMA = json.loads(tree.text("deploy/chart/hami-agent/values.schema.json"))


def test_the_chart_has_the_version_of_the_agent():
    assert __version__ == CHART["version"] == CHART["appVersion"]


def test_the_schema_of_config_needs_no_helm(tmp_path: Path):
    render.main(None, tmp_path)

    assert [tmp_path / render.SCHEMA] == [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tree.text(str(render.SCHEMA)) == (tmp_path / render.SCHEMA).read_text(), "make settings"


def test_each_setting_is_the_operators_or_the_charts():
    for field in FIELDS:
        section, _, name = field.key.partition(".")
        properties = SCHEMA["$defs"]["settings"]["properties"]
        offered = (
            name in properties.get(section, {}).get("properties", {})
            if name
            else (section in properties)
        )

        assert offered == (section not in render.CHARTS_OWN and field.key != "library.hookPath")


def test_every_default_value_is_in_the_schema_and_no_other_name_is():
    given = yaml.safe_load(tree.text("deploy/chart/hami-agent/values.yaml"))

    assert set(SCHEMA["properties"]) == set(given)
    for name in ("image", "devicePlugin", "library", "service", "global"):
        assert set(SCHEMA["properties"][name]["properties"]) == set(given[name]), name
