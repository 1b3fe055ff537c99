"""What a person sees of the verbs: help with an example, tables, JSON, exit codes."""

import json
import subprocess
import sys

import pytest
import yaml

from agent.cli.main import VERBS, dispatch

ACTIONS = {
    "config": ("show", "check", "schema"),
    "simulate": ("xid", "lose", "refuse", "restore", "remove", "hang", "add", "list"),
}


@pytest.mark.parametrize(
    "words",
    [*([verb] for verb in VERBS), *([verb, name] for verb in ACTIONS for name in ACTIONS[verb])],
    ids=" ".join,
)
def test_help_ends_with_an_example(words, capsys):
    assert dispatch([*words, "--help"], {}) == 0

    helped, _, example = " ".join(capsys.readouterr().out.split()).partition("example: ")
    assert f"hami-agent {' '.join(words)}" in helped
    assert f"hami-agent {' '.join(words)}" in example


def test_no_verb_prints_the_help_and_is_a_usage_error(capsys):
    assert dispatch([], {}) == 2
    out = capsys.readouterr().out
    assert all(verb in out for verb in VERBS)


@pytest.mark.parametrize("words", [["version"], ["config", "show"], ["config", "check"]])
def test_json_is_asked_for_alike_everywhere(words, capsys):
    assert dispatch([*words, "-o", "table"], {}) == 0
    capsys.readouterr()

    assert dispatch([*words, "-o", "json"], {}) == 0
    document = json.loads(capsys.readouterr().out)
    assert ["apiVersion", "kind", "generatedAt", "data"] == list(document)
    assert dispatch([*words, "-o", "yaml"], {}) == 0
    assert document["data"] == yaml.safe_load(capsys.readouterr().out)["data"]


def test_version_names_what_a_support_case_needs_and_the_schema_is_printed(capsys):
    assert dispatch(["version"], {}) == 0
    line = capsys.readouterr().out
    assert dispatch(["--version"], {}) == 0
    assert line == capsys.readouterr().out
    assert (1, True) == (line.count("\n"), line.startswith("hami-agent "))
    assert dispatch(["version", "-o", "json"], {}) == 0
    assert {"version", "python", "registerProfile", "stateVersion"} == set(
        json.loads(capsys.readouterr().out)["data"]
    )
    assert dispatch(["config", "schema"], {}) == 0
    assert (
        "splitCount" in json.loads(capsys.readouterr().out)["properties"]["sharing"]["properties"]
    )


def test_what_a_verb_loads_is_left_out_of_every_collection():
    program = (
        "import gc; gc.disable()\n"
        "from agent.cli.main import dispatch\n"
        "code = dispatch(['version'], {})\n"
        "print(code, gc.isenabled(), gc.get_freeze_count() > len(gc.get_objects()))"
    )
    command = [sys.executable, "-c", program]
    answer = subprocess.run(  # noqa: S603 -- our own interpreter and arguments
        command, check=True, capture_output=True, text=True
    )

    assert "0 True True" == answer.stdout.splitlines()[-1]


def test_as_a_plugin_of_kubectl_the_help_names_kubectl(capsys):
    assert 0 == dispatch(["status", "--help"], {}, "kubectl hami")

    said = capsys.readouterr().out
    assert said.startswith("usage: kubectl hami status ")
    assert "example: kubectl hami status " in said
    assert "hami-agent " not in said.replace("/etc/hami-agent", "")
