"""What the chart gives a Prometheus operator and a Grafana is what the files say."""

import json
import re

import pytest
import yaml

from tests.chart.lab.helm import CHART, NAMESPACE, Helm, container, of_kind, pod_of, the
from tests.chart.lab.values import LEAST, values

FILES = CHART / "files"
BOTH = {**LEAST, "devicePlugin": {"monitor": {"enabled": True}}}
KINDS = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


def test_nothing_of_it_is_there_unless_asked_for(helm: Helm):
    found = helm.objects(values("least"))

    assert set() == {one["kind"] for one in found} & KINDS
    assert "agent-hami-agent-dashboard" not in of_kind(found, "ConfigMap")


def test_the_alerts_are_those_of_the_file(helm: Helm):
    rule = the(helm.objects({**LEAST, "prometheusRule": {"enabled": True}}), "PrometheusRule")

    assert yaml.safe_load((FILES / "rules.yaml").read_text()) == rule["spec"]


def test_every_alert_links_to_the_runbook_where_people_read_it(helm: Helm):
    url = "https://wiki.example/hami/RUNBOOK.md"
    asked = {**LEAST, "prometheusRule": {"enabled": True, "runbookUrl": url}}
    rule = the(helm.objects(asked), "PrometheusRule")
    alerts = [one for group in rule["spec"]["groups"] for one in group["rules"]]

    assert alerts
    assert all(one["annotations"]["runbook_url"].startswith(f"{url}#") for one in alerts)
    assert not any("runbook" in one["annotations"] for one in alerts)


def test_under_another_name_the_alerts_are_about_that_job(helm: Helm):
    found = helm.objects(values("watched"))
    text = json.dumps(the(found, "PrometheusRule")["spec"])
    labels = the(found, "DaemonSet")["spec"]["template"]["metadata"]["labels"]

    assert {"gpus"} == set(re.findall(r'job=\\"([^"\\]+)\\"', text))
    assert "gpus" == labels[the(found, "PodMonitor")["spec"]["jobLabel"]]


def test_the_dashboard_is_the_file(helm: Helm):
    found = helm.objects(values("watched"))
    (board,) = (
        one for name, one in of_kind(found, "ConfigMap").items() if name.endswith("-dashboard")
    )

    assert json.loads((FILES / "dashboard.json").read_text()) == json.loads(
        board["data"]["hami-agent.json"]
    )
    assert ("grafana", "1") == (
        board["metadata"]["namespace"],
        board["metadata"]["labels"]["grafana_dashboard"],
    )


def test_the_pods_are_scraped_by_ports_that_they_have(helm: Helm):
    found = helm.objects({**BOTH, "podMonitor": {"enabled": True}})
    pod = pod_of(found)
    ends = the(found, "PodMonitor")["spec"]["podMetricsEndpoints"]
    ports = {
        port["name"]
        for name in ("agent", "vgpu-monitor")
        for port in container(pod, name).get("ports", ())
    }

    assert ports == {end["port"] for end in ends}


def test_the_services_are_scraped_by_ports_that_they_have_and_by_the_label_of_the_job(helm: Helm):
    found = helm.objects({**BOTH, "serviceMonitor": {"enabled": True}})
    monitor = the(found, "ServiceMonitor")["spec"]
    services = of_kind(found, "Service").values()

    assert {port["name"] for one in services for port in one["spec"]["ports"]} == {
        end["port"] for end in monitor["endpoints"]
    }
    assert {"hami-agent"} == {one["metadata"]["labels"][monitor["jobLabel"]] for one in services}
    assert [NAMESPACE] == monitor["namespaceSelector"]["matchNames"]


@pytest.mark.parametrize("kind", ["serviceMonitor", "podMonitor"])
def test_only_the_agents_own_labels_are_kept_and_only_they_are_its_job(helm: Helm, kind: str):
    found = helm.objects({**BOTH, kind: {"enabled": True}})
    spec = the(found, kind[0].upper() + kind[1:])["spec"]
    own, monitors = spec.get("endpoints") or spec["podMetricsEndpoints"]
    jobs = [one["replacement"] for one in monitors["relabelings"] if one["targetLabel"] == "job"]

    assert (True, None) == (own["honorLabels"], monitors.get("honorLabels"))
    assert ["agent-hami-agent-monitor"] == jobs
    assert all(
        "node" in {one["targetLabel"] for one in end["relabelings"]} for end in spec_ends(spec)
    )


def spec_ends(spec):
    return spec.get("endpoints") or spec["podMetricsEndpoints"]
