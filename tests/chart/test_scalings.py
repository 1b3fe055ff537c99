"""A fraction of helm's --set is a text, and a number of the agent's all the same."""

import yaml

from tests.chart.lab.helm import CHART, Helm
from tests.chart.test_values import own_file, written


def test_a_scaling_of_the_agents_own_may_be_set_as_a_fraction(helm: Helm):
    fractions = ["config.sharing.memoryScaling=1.5", "config.sharing.coreScaling=0.5"]
    found = written(
        own_file(
            tuple(helm.told("agent", CHART, ["image.repository=kept", *fractions])),
            "agent-hami-agent",
        )
    )

    assert {"sharing.memoryScaling": 1.5, "sharing.coreScaling": 0.5} == found


def test_a_scaling_of_a_profile_may_be_set_as_a_fraction(helm: Helm):
    profile = ["name=p", "match.nodes[0]=a", "sharing.memoryScaling=1.5", "sharing.splitCount=7"]
    given = ["image.repository=kept", *(f"config.profiles[0].{one}" for one in profile)]
    text = own_file(tuple(helm.told("agent", CHART, given)), "agent-hami-agent")

    (found,) = yaml.safe_load(text)["profiles"]
    assert {"memoryScaling": 1.5, "splitCount": 7} == found["sharing"]
