"""What HAMi's own decoders of five versions read from the agent's register annotation.

The golden file was made by running those decoders on the texts; the scheduler's model must read
the same, and the agent must go on writing those very texts.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from agent.hami.register import NodeReport, RegisteredGpu, ReportProfile, ReportSettings, report_of
from agent.sandbox.scheduler.registry import Version, decode
from tests.unit.codec.skew import inventory
from tests.unit.codec.test_register_vectors import gpu_of

GOLDEN = Path(__file__).parents[2] / "golden" / "register-annotation.json"
READ: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["read"]
TEXTS: dict[str, str] = json.loads(GOLDEN.read_text(encoding="utf-8"))["texts"]
VERSIONS = {
    "2.4": Version.V2_4,
    "2.7.1": Version.V2_7,
    "2.8": Version.V2_8,
    "2.9": Version.V2_9,
    "2.10": Version.V2_10,
}
PROFILES = {
    "2.7.1": ReportProfile.COLON,
    "2.8": ReportProfile.JSON,
    "2.9": ReportProfile.JSON,
    "2.10": ReportProfile.JSON,
}


def the_report(profile: ReportProfile) -> NodeReport:
    report = report_of(inventory(), {}, ReportSettings(profile))
    assert report is not None
    return report


def golden(version: str, profile: str) -> tuple[RegisteredGpu, ...] | None:
    read = READ[version][profile]
    return tuple(map(gpu_of, read["gpus"])) if "gpus" in read else None


@pytest.mark.parametrize("profile", ReportProfile)
def test_the_agent_writes_the_text_that_was_read(profile: ReportProfile):
    assert TEXTS[profile] == the_report(profile).register


@pytest.mark.parametrize("version", PROFILES)
def test_each_version_reads_the_whole_inventory_in_its_profile(version: str):
    profile = PROFILES[version]

    read = golden(version, profile)

    assert read is not None
    told = the_report(profile).gpus
    assert [(gpu.uuid, gpu.healthy) for gpu in told] == [(gpu.uuid, gpu.healthy) for gpu in read]
    assert told == read
    assert all("nvidia" in gpu.type_name.lower() for gpu in read)


@pytest.mark.parametrize("version", ["2.8", "2.9", "2.10"])
@pytest.mark.parametrize("text", ["colon", "colon-7"])
def test_schedulers_of_json_read_nothing_else(version: str, text: str):
    assert golden(version, text) is None


def test_2_4_reads_seven_fields_alone():
    assert golden("2.4", ReportProfile.COLON) is None
    assert golden("2.4", ReportProfile.JSON) is None


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_scheduler_model_reads_what_hami_reads(version: str, text: str):
    assert golden(version, text) == decode(TEXTS[text], VERSIONS[version])
