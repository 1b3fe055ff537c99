"""What GUIDE.md says of manifests and settings is what scheduler, webhook and agent do."""

import copy
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from agent.errors import SettingsError
from agent.ledger import SourceFile
from agent.sandbox.scheduler.model import CORES, COUNT, MEMORY, SchedulerSettings, pod_requests
from agent.sandbox.scheduler.webhook import DeniedError, review_pod
from agent.settings.reading import FOREIGN, Sources, make_plan
from agent.settings.schema import FIELDS
from tests.shape import tree

PAGE = tree.text("GUIDE.md")
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
POD, THEIRS, OURS, _ = BLOCKS
SETTINGS = SchedulerSettings()


def admitted(limits: dict[str, object]) -> Any:
    """The example with these limits, as HAMi's webhook lets it in."""
    pod: Any = copy.deepcopy(yaml.safe_load(POD))
    pod["spec"]["containers"][0]["resources"]["limits"] = limits
    return review_pod(pod, SETTINGS)


def limits_of(pod: Any) -> dict[str, object]:
    found: dict[str, object] = pod["spec"]["containers"][0]["resources"]["limits"]
    return found


def test_the_example_is_a_pod_and_asks_for_what_its_remarks_say():
    pod = yaml.safe_load(POD)
    kubernetes_validate.validate(pod, "1.36", strict=True)
    (request,) = pod_requests(admitted(limits_of(pod)), SETTINGS)

    assert request is not None
    assert (1, 8000, 30) == (request.count, request.memory_mib, request.core_percent)


def test_a_gpu_alone_is_a_whole_one_with_hamis_scheduler_and_with_memory_it_is_not():
    assert "100" == limits_of(admitted({COUNT: 1}))[CORES]
    assert CORES not in limits_of(admitted({COUNT: 1, MEMORY: 8000}))


def test_memory_with_a_unit_drops_the_request():
    assert (None,) == pod_requests(admitted({COUNT: 1, MEMORY: "3Gi"}), SETTINGS)


def test_a_pod_with_a_privileged_container_or_a_node_is_refused():
    privileged, placed = yaml.safe_load(POD), yaml.safe_load(POD)
    privileged["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    placed["spec"]["nodeName"] = "gpu-1"

    for pod in (privileged, placed):
        with pytest.raises(DeniedError):
            review_pod(pod, SETTINGS)


def test_the_settings_for_time_slicing_are_taken():
    plan = make_plan(Sources(own=SourceFile("config.yaml", OURS.encode())))
    found = plan.resolve()

    assert ("none", 10) == (found["scheduler"].value, found["sharing.splitCount"].value)
    assert yaml.safe_load(THEIRS)["sharing"]["timeSlicing"]["resources"][0]["replicas"] == 10


def test_the_configuration_of_nvidias_plugin_is_refused_with_a_sentence():
    with pytest.raises(SettingsError, match=r"^config\.yaml:\d+:1: version cannot be set"):
        make_plan(Sources(own=SourceFile("config.yaml", THEIRS.encode())))


def test_a_variable_that_keeps_its_name_is_read():
    (kept,) = re.findall(r"^These keep name and meaning: (.+?)\[", PAGE, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(\w+)`", kept))

    assert len(named) > 12
    assert set() == named - {name for field in FIELDS for name in field.env}


def test_a_variable_of_theirs_that_is_named_is_known_to_the_agent():
    named = set(re.findall(r"`((?!HAMI_)[A-Z]+(?:_[A-Z]+)+)`", PAGE))
    known = {name for field in FIELDS for name in field.env} | set(FOREIGN)

    assert {"SHARED_DEVICES_ALLOCATION_POLICY", "CUDA_MPS_PIPE_DIRECTORY"} == named - known
