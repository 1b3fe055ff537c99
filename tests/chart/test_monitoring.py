"""What the chart gives a Prometheus operator and a Grafana is what the files say."""

import json

import yaml

from tests.chart.lab.helm import CHART, NAMESPACE, container, of_kind, pod_of, the
from tests.chart.lab.values import LEAST, values

FILES = CHART / "files"
BOTH = {**LEAST, "devicePlugin": {"monitor": {"enabled": True}}}


def test_the_alerts_are_those_of_the_file_and_link_to_the_runbook_where_people_read_it(helm):
    url = "https://wiki.example/hami/RUNBOOK.md"
    plain, linked = (
        the(helm.objects({**LEAST, "prometheusRule": {"enabled": True, **more}}), "PrometheusRule")
        for more in ({}, {"runbookUrl": url})
    )
    alerts = [one["annotations"] for group in linked["spec"]["groups"] for one in group["rules"]]

    assert yaml.safe_load((FILES / "rules.yaml").read_text()) == plain["spec"]
    assert alerts
    assert all(one["runbook_url"].startswith(f"{url}#") for one in alerts)
    assert not any("runbook" in one for one in alerts)


def test_the_dashboard_is_the_file(helm):
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


def test_the_pods_are_scraped_by_ports_that_they_have(helm):
    found = helm.objects({**BOTH, "podMonitor": {"enabled": True}})
    pod = pod_of(found)
    ends = the(found, "PodMonitor")["spec"]["podMetricsEndpoints"]
    ports = {
        port["name"]
        for name in ("agent", "vgpu-monitor")
        for port in container(pod, name).get("ports", ())
    }

    assert ports == {end["port"] for end in ends}


def test_the_services_are_scraped_by_ports_that_they_have_and_by_the_label_of_the_job(helm):
    found = helm.objects({**BOTH, "serviceMonitor": {"enabled": True}})
    monitor = the(found, "ServiceMonitor")["spec"]
    services = of_kind(found, "Service").values()

    assert {port["name"] for one in services for port in one["spec"]["ports"]} == {
        end["port"] for end in monitor["endpoints"]
    }
    assert {"hami-agent"} == {one["metadata"]["labels"][monitor["jobLabel"]] for one in services}
    assert [NAMESPACE] == monitor["namespaceSelector"]["matchNames"]
