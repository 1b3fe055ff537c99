"""Helm takes every command of the documents, and those that name the chart give objects."""

import itertools
import json
import re
import shlex
from typing import Any

import pytest
import yaml

from agent.settings.schema import BY_KEY
from tests.chart.lab.helm import ROOT, of_kind, pod_of, the
from tests.shape import tree
from tests.shape.typed import runs_of

CHART = "deploy/chart/hami-agent"
BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GUIDE = tree.text("GUIDE.md")

CHARTS = {CHART, "hami-charts/hami"}
THEIRS = {"devicePlugin.enabled"}
"""A value of HAMi's chart and of GPU Operator's."""


def lines() -> list[str]:
    """What is typed, each command on one line."""
    found = BLOCKS.findall(GUIDE)
    blocks = (block for language, block in found if not language)
    return "".join(blocks).replace("\\\n", " ").splitlines()


def commands() -> list[list[str]]:
    words = [shlex.split(line) for line in lines()]
    return [one for one in words if one[0] == "helm" and CHART in one]


def settings(command: list[str]) -> list[str]:
    """What it sets; what an upgrade keeps is the image."""
    given = [word for flag, word in itertools.pairwise(command) if flag == "--set"]
    return given if "install" in command else ["image.repository=kept", *given]


def test_what_is_typed_in_the_agents_pods_is_typed_elsewhere():
    typed = [re.findall(r" -c agent -- hami-agent (.+)$", line) for line in lines()]

    # tests/cli/test_doctor.py types the first, tests/process/test_agent_doctor.py the second.
    assert {"doctor --pre", "doctor"} == set(itertools.chain(*typed))


def test_the_selector_finds_the_agents_pods(helm):
    names = set(re.findall(r"--selector (\S+)", GUIDE))
    found = helm.told("hami-agent", ROOT / CHART, ["image.repository=kept"])
    labels = the(found, "DaemonSet")["spec"]["template"]["metadata"]["labels"]

    assert names
    assert names <= {f"{key}={value}" for key, value in labels.items()}


def test_openshift_allows_what_the_pods_have_and_no_other_account(helm):
    (text,) = [body for language, body in BLOCKS.findall(GUIDE) if "SecurityContext" in body]
    allowed = yaml.safe_load(text)
    on = ["image.repository=kept", "devicePlugin.monitor.enabled=true"]
    found = helm.told("hami-agent", ROOT / CHART, on)
    accounts = of_kind(found, "ServiceAccount")
    pods = [pod_of(found), the(found, "Job")["spec"]["template"]["spec"]]
    kinds = {
        kind
        for pod in pods
        for volume in pod.get("volumes", ())
        for kind in volume
        if kind != "name"
    }

    assert kinds == set(allowed["volumes"])
    assert ["ALL"] == allowed["requiredDropCapabilities"]
    assert {"allowHostDirVolumePlugin"} == {
        key for key, value in allowed.items() if key.startswith("allow") and value
    }
    assert {f"system:serviceaccount:kube-system:{one}" for one in accounts} == set(allowed["users"])


@pytest.mark.parametrize("words", runs_of("helm"), ids=" ".join)
def test_helm_has_the_command_and_its_flags(helm, words):
    assert f"\nUsage:\n  helm {words[0]} " in helm.help(words)


def test_what_is_installed_or_upgraded_is_one_of_two_charts():
    typed = [words for words in runs_of("helm") if words[0] in {"install", "upgrade"}]
    charts = {word for words in typed for word in words[2:3]}

    assert CHARTS == charts


def test_an_upgrade_takes_what_is_new_from_the_chart():
    upgrades = [words for words in runs_of("helm") if words[0] == "upgrade" and words[1:]]

    assert [] == [one for one in upgrades if "--reset-then-reuse-values" not in one]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_command_gives_what_it_says(helm, command):
    found = helm.told(command[2], ROOT / command[3], settings(command))

    assert pod_of(found)["containers"]


def test_the_command_for_another_namespace_lets_it_in(helm):
    (command,) = [one for one in commands() if "networkPolicy.from" in shlex.join(one)]
    found = helm.told(command[2], ROOT / command[3], settings(command))
    named = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "NAME"}}}
    (rule,) = of_kind(found, "NetworkPolicy")["hami-agent"]["spec"]["ingress"]

    assert named == rule["from"][-1]
    assert len(rule["from"]) == 3


def test_every_name_of_a_value_is_one():
    schema = json.loads(tree.text(f"{CHART}/values.schema.json"))
    sections = "|".join(schema["properties"])
    names = rf"`((?:{sections})\.(?!io/|json|needs|sock|would|yaml)[A-Za-z][A-Za-z.]+)"
    told = re.findall(names, GUIDE)

    assert len(set(told)) > 20
    assert THEIRS == {name for name in told if name not in BY_KEY and not is_known(schema, name)}


def is_known(schema: dict[str, Any], name: str) -> bool:
    """Whether the values have such a name; below what Kubernetes defines, any will do."""
    here = schema
    for word in name.split("."):
        target = here.get("$ref", "").rpartition("/")[2]
        section = schema["$defs"][target] if target else here
        if "properties" not in section:
            return section.get("type") == "object"
        here = section["properties"].get(word)
        if here is None:
            return False
    return True
