"""Alerts and dashboard speak of series that there are, and lead to a heading of the runbook."""

import itertools
import json
import re

from tests.prometheus.lab.expressions import DASHBOARD, alerts, panels
from tests.shape import tree
from tests.shape.test_documents import anchors

MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
OWN = re.compile(r"\bhami_agent_\w+")
HELD_BY = {"job", "node", "instance"}
"""Labels whose values are no words of the agent."""


def test_an_alert_says_what_where_and_what_to_do_and_leads_to_the_runbook():
    for alert in alerts():
        told = alert["annotations"]
        document, _, anchor = told["runbook"].partition("#")

        assert {"severity"} == set(alert["labels"])
        assert {"summary", "description", "runbook"} == set(told)
        for text in (told["summary"], told["description"]):
            assert text.endswith(".")
            assert "\n" not in text
            assert "$labels.node $labels.instance" in text or "absent(" in alert["expr"]
        assert ": " in told["description"], "what to do follows a colon"
        assert 1 == told["description"].replace("{{", "").count(".") - told["description"].count(
            "$l"
        )
        assert "RUNBOOK.md" == document
        assert anchor in anchors(tree.text(document))


def test_the_runbook_lists_each_alert_once_with_its_severity():
    listed = re.findall(r"^\| `(HamiAgent\w+)` \| (\w+) \|", tree.text("RUNBOOK.md"), re.MULTILINE)

    assert listed == [(alert["alert"], alert["labels"]["severity"]) for alert in alerts()]
    assert 15 < len(listed) == len(dict(listed))
    assert {"critical", "warning", "info"} >= {severity for _, severity in listed}


def expressions() -> list[str]:
    """All that is asked of Prometheus."""
    return [alert["expr"] for alert in alerts()] + [expression for _, expression in panels()]


def test_each_series_that_is_asked_for_is_one():
    listed = set(re.findall(r"^\| `(\w+)` \|", tree.text("METRICS.md"), re.MULTILINE))
    asked = set(itertools.chain.from_iterable(map(OWN.findall, expressions())))

    assert len(asked) > 20
    assert set() == {name.removesuffix("_bucket") for name in asked} - listed


def test_each_value_of_a_label_that_is_asked_for_is_a_word_of_the_agent():
    source = "".join(
        tree.text(path)
        for path in tree.modules("agent")
        if not path.is_relative_to("agent/sandbox")
    )
    words = {
        word
        for expression in expressions()
        for label, values in MATCHER.findall(expression)
        if label not in HELD_BY
        for word in values.split("|")
    }

    assert {"refused", "released", "stream", "healthy"} <= words
    assert [] == sorted(word for word in words if f'"{word}"' not in source)


def test_the_dashboard_is_whole():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    shown = dashboard["panels"]

    assert len({panel["id"] for panel in shown}) == len(shown)
    assert all(panel["title"] and panel["description"].endswith(".") for panel in shown)
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(shown))) - {"__rate_interval"}
    assert used == {one["name"] for one in dashboard["templating"]["list"]}
