"""The rules for names on the metrics page find what Prometheus' own critic finds."""

import pytest

from tests.metric_rules import faults


def page(name: str, kind: str = "gauge", text: str = "What is told here now.", labels="") -> str:
    name = f"hami_agent_{name}"
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name}{labels} 1.0\n"


def test_a_name_that_keeps_the_rules_has_no_fault():
    assert [] == faults(page("slices", labels='{gpu="0",state="a \\" le=\\"1\\" b"}'))
    assert [] == faults(page("health_since_timestamp_seconds", text="Unix time since it holds."))


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (page("slices_total"), "counters end with _total"),
        (page("events", "counter"), "counters end with _total"),
        (page("calls_bucket"), "only histograms end with _bucket"),
        (page("calls_count"), "only histograms and summaries"),
        (page("slices_gauge"), "the type is no part of the name"),
        (page("slicesHeld"), "lower case"),
        (page("rest_minutes"), "units are seconds and bytes"),
        (page("rest_ms"), "units are seconds and bytes"),
        (page("memory_mebibytes"), "units are seconds and bytes"),
        (page("slices", text="Two words"), "no sentence"),
        (page("slices", text=""), "no sentence"),
        (page("since_seconds", text="Unix time since it holds."), "a moment ends with"),
        (page("slices", labels='{Gpu="0"}'), "label Gpu"),
        (page("slices", labels='{le="0"}'), "label le"),
        (page("slices", labels='{quantile="0"}'), "label quantile"),
    ],
)
def test_each_fault_is_found(bad, fault):
    (found,) = faults(bad)

    assert fault in found


def test_metrics_of_others_need_a_help_text_alone():
    assert [] == faults("# HELP python_info Python\n# TYPE python_info gauge\npython_info 1.0\n")
    assert ["python_info: no help text"] == faults("# TYPE python_info gauge\npython_info 1.0\n")
