"""What is generated is in step with the code: SETTINGS.md, METRICS.md, and the chart's schema."""

import itertools
import json
import re

import pytest
import yaml

from agent import __version__
from agent.setting import HOW
from agent.settings.files import DEVICE_CONFIG, NODE_CONFIG, WITHOUT_EFFECT
from agent.settings.reading import FOREIGN, LASTING, flag_of
from agent.settings.schema import BY_KEY, FIELDS
from deploy import metrics, render, settings_page
from tests.shape import tree

SCHEMA = json.loads(tree.text("deploy/chart/hami-agent/values.schema.json"))
PAGE = tree.text("SETTINGS.md")
HEAD, REFERENCE = PAGE.split(settings_page.BEGIN)
ENTRY = re.compile(r"^### (\S+)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
ENTRIES = dict(ENTRY.findall(REFERENCE))


DOCUMENTS = [str(p) for p in tree.files() if p.suffix == ".md" and p.name != "CHANGELOG.md"]
NVIDIAS = {"sharing.mps", "sharing.timeSlicing"}
"""Keys of NVIDIA's plugin."""
SECTIONS = {field.key.partition(".")[0] for field in FIELDS}


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_reference_is_what_the_table_of_settings_gives(tmp_path):
    (page := tmp_path / "SETTINGS.md").write_text(PAGE)

    settings_page.main(page)

    assert page.read_text() == PAGE, "make settings"


def test_every_setting_has_one_entry_with_its_sentence_and_every_name_that_is_read():
    keys = [key for key, _ in ENTRY.findall(REFERENCE)]
    assert sorted(field.key for field in FIELDS) == sorted(keys)
    for field in FIELDS:
        said = flat(ENTRIES[field.key])

        assert said.startswith(field.text.removesuffix(HOW))
        names = {*field.variables, *field.other_flags, *filter(None, [field.flag])}
        assert names <= set(re.findall(r"`([^`]+)`", said))
        assert ("at the next start" in said.lower()) == (not field.live)
    for file, pairs in {"device-config.yaml": DEVICE_CONFIG, "config.json": NODE_CONFIG}.items():
        for theirs, ours in pairs.items():
            assert f"`{theirs}` in {file}" in flat(ENTRIES[ours])


def test_what_is_accepted_without_effect_is_named():
    (section,) = re.findall(r"^## Without effect here\n(.*)", REFERENCE, re.MULTILINE | re.DOTALL)
    names = {*FOREIGN, *map(flag_of, FOREIGN), *itertools.chain(*WITHOUT_EFFECT.values())}

    assert names <= set(re.findall(r"`([^`]+)`", section))
    # And what the chart sets itself.
    assert {*render.CHARTS_OWN, "library.hookPath"} <= set(re.findall(r"`([\w.]+)`", HEAD))


def test_what_changes_only_on_a_drained_node_is_what_the_agent_keeps_while_pods_hold_slices():
    said = {field.key for field in FIELDS if "Only on a drained node" in flat(ENTRIES[field.key])}

    assert set(LASTING) == said


def test_a_setting_that_a_document_names_is_one():
    form = rf"`((?:{'|'.join(SECTIONS)})\.[a-zA-Z]+)\b[^`]*`"
    texts = "".join(map(tree.text, DOCUMENTS))
    named = set(re.findall(form, texts)) - set(BY_KEY) - NVIDIAS
    values = {
        f"{section}.{key}"
        for section, part in SCHEMA["properties"].items()
        for key in part.get("properties", ())
    }
    source = "".join(map(tree.text, tree.modules("agent")))

    # Others are values of the chart, or events of the log.
    assert [] == [one for one in named - values if f'"{one}"' not in source]


# METRICS.md.


def test_the_document_is_what_the_code_says_and_lists_no_series_twice():
    document = metrics.document()
    names = re.findall(r"(?m)^\| `(\w+)` \|", document)

    assert document == tree.text(metrics.DOCUMENT), "run make metrics"
    assert 50 < len(names) == len(set(names))


def test_a_counter_whose_text_is_no_literal_is_refused(tmp_path):
    (tmp_path / "a.py").write_text('TEXT = "Things."\nTally("things_total", TEXT)\n')

    with pytest.raises(ValueError, match="malformed"):
        list(metrics.of_services(tmp_path))


# The chart.


def test_the_schema_of_config_needs_no_helm(tmp_path):
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
    chart = yaml.safe_load(tree.text("deploy/chart/hami-agent/Chart.yaml"))

    assert __version__ == chart["version"] == chart["appVersion"]
    assert set(SCHEMA["properties"]) == set(given)
    for name in ("image", "devicePlugin", "library", "service", "global"):
        assert set(SCHEMA["properties"][name]["properties"]) == set(given[name]), name
