"""Each image is the one that its values name, and one that goes by a tag alone is told."""

import pytest

from tests.chart.lab.helm import Helm, container, pod_of, the
from tests.chart.lab.values import DIGEST, LEAST, Values, values


@pytest.mark.parametrize(
    ("name", "agent", "library"),
    [
        ("least", "example/hami-agent:0.2.0", "projecthami/hami:v2.10.0"),
        (
            "digest",
            f"registry.example:5000/example/hami-agent@{DIGEST}",
            f"projecthami/hami@{DIGEST}",
        ),
    ],
)
def test_an_image_is_named_by_tag_or_digest(helm: Helm, name: str, agent: str, library: str):
    pod = pod_of(helm.objects(values(name)))

    assert agent == container(pod)["image"]
    assert library == container(pod, "library")["image"]


def test_a_digest_wins_over_every_tag(helm: Helm):
    pinned = {"tag": "moved", "digest": DIGEST}
    objects = helm.objects(
        {
            "image": {**LEAST["image"], **pinned},
            "library": {"image": pinned},
            "devicePlugin": {
                "gpuOperatorToolkitReady": {"enabled": True},
                "monitor": {"enabled": True, "image": pinned},
            },
            "requireDigests": True,
        }
    )
    pods = [pod_of(objects), the(objects, "Job")["spec"]["template"]["spec"]]
    images = {
        one["name"]: one["image"]
        for pod in pods
        for one in (*pod.get("initContainers", ()), *pod["containers"])
    }

    assert {"agent", "library", "toolkit", "uninstall", "vgpu-monitor"} == set(images)
    assert {DIGEST} == {image.partition("@")[2] for image in images.values()}


@pytest.mark.parametrize(
    "unused",
    [
        {"library": {"image": {"pullPolicy": "Never"}}},
        {"library": {"place": False}},
        {"observe": True, "devicePlugin": {"monitor": {"enabled": True}}},
    ],
    ids=["never pulled", "not placed", "observed"],
)
def test_no_digest_is_wanted_of_what_is_not_pulled(helm: Helm, unused: Values):
    pinned = {"image": {**LEAST["image"], "digest": DIGEST}, "requireDigests": True}

    assert helm.objects({**pinned, **unused})
    assert "digest" not in helm.notes({**pinned, **unused}, "1.36")


def test_one_registry_serves_all_images(helm: Helm):
    given = {**values("monitor"), "global": {"imageRegistry": "mirror.example"}}
    pod = pod_of(helm.objects(given))

    assert {"mirror.example"} == {
        one["image"].partition("/")[0] for one in (*pod["initContainers"], *pod["containers"])
    }


def test_secrets_for_pulling_are_named_once(helm: Helm):
    pod = pod_of(helm.objects(values("digest")))

    assert [{"name": "all"}, {"name": "mine"}] == pod["imagePullSecrets"]


def test_the_notes_name_what_goes_by_a_tag_alone(helm: Helm):
    least, all_of_them = (helm.notes(values(name), "1.36") for name in ("least", "monitor"))

    assert "\n  image.digest, library.image.digest\n" in least
    assert (
        "\n  devicePlugin.monitor.image.digest, image.digest, library.image.digest\n" in all_of_them
    )
    assert "Images without a digest" not in helm.notes(values("digest"), "1.36")
