"""What is kept of the objects of a cluster, and what counts as absent."""

import datetime as dt

import msgspec
import pytest

from agent.kube.reader import ListedPod, PodEventView, decode_listed, decode_pod_event

NOON = dt.datetime(2026, 1, 2, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("parts", "last", "writer"),
    [
        ({"lastTimestamp": "2026-01-02T12:00:00Z"}, NOON, ""),
        ({"eventTime": "2026-01-02T12:00:00Z", "reportingComponent": "kubelet"}, NOON, "kubelet"),
        (
            {
                "series": {"lastObservedTime": "2026-01-02T12:00:00.000000Z"},
                "source": {"component": "hami-scheduler"},
            },
            NOON,
            "hami-scheduler",
        ),
        ({"metadata": {"creationTimestamp": "2026-01-02T12:00:00Z"}}, NOON, ""),
        ({"lastTimestamp": "noon"}, None, ""),
    ],
)
def test_an_event_of_either_form_has_a_last_time(
    parts: dict, last: dt.datetime | None, writer: str
):
    event = {"type": "Warning", "reason": "FilteringFailed", "message": "no"} | parts

    assert PodEventView("Warning", "FilteringFailed", "no", writer, last) == (
        decode_pod_event(event)
    )


@pytest.mark.parametrize(
    ("volumes", "is_plugin"),
    [
        ([{"emptyDir": {}}, {"hostPath": {"path": "/data/kubelet/device-plugins/"}}], True),
        # The label alone makes no agent.
        *((one, False) for one in (None, [], [{"hostPath": {"path": "/var/lib/kubelet"}}], [3])),
    ],
)
def test_a_device_plugin_mounts_the_directory_of_plugins(volumes: list | None, *, is_plugin: bool):
    labels = {"app.kubernetes.io/component": "hami-agent"}
    spec = {"nodeName": "n1", "volumes": volumes}
    pod = {"metadata": {"namespace": "d", "name": "p", "labels": labels}, "spec": spec}
    expected = ListedPod("d", "p", "n1")

    assert msgspec.structs.replace(expected, is_plugin=is_plugin) == decode_listed(pod)
