"""What the Node's annotations must say, and when they say it already."""

import pytest

from agent.cluster import REGISTER, SCORE
from agent.hami.annotations import (
    NodeReport,
    ReportProfile,
    ReportSettings,
    encode_json,
    read_register,
    registered,
    report_of,
)
from agent.model import Inventory, Link, PciPath
from tests.builders import a_gpu, a_shared_gpu, a_uuid, an_inventory

JSON = ReportSettings()
SCORED = ReportSettings(topology_score=True)
TEXT = encode_json(registered(an_inventory()))
SCORES = (
    f'[{{"uuid":"{a_uuid(0)}","score":{{"{a_uuid(1)}":220}}}},'
    f'{{"uuid":"{a_uuid(1)}","score":{{"{a_uuid(0)}":220}}}}]'
)


def linked() -> Inventory:
    """Two GPUs with two NVLinks between them."""
    rows: list[tuple[Link, ...]] = [
        (Link(a_uuid(1), PciPath.SAME_CPU, 2),),
        (Link(a_uuid(0), PciPath.SAME_CPU, 2),),
    ]
    return an_inventory(
        gpus=[a_shared_gpu(gpu=a_gpu(index=n, links=row)) for n, row in enumerate(rows)]
    )


def the_report(inventory: Inventory, annotations, settings=JSON) -> NodeReport:
    report = report_of(inventory, annotations, settings)
    assert report is not None
    return report


@pytest.mark.parametrize("profile", ReportProfile)
def test_the_form_alone_is_a_difference(profile: ReportProfile):
    """All that is said of a GPU of this name is the same in both forms."""
    old = a_shared_gpu(gpu=a_gpu(name="Tesla P4"))
    inventory = an_inventory(gpus=[old])
    text = the_report(inventory, {}, ReportSettings(profile)).register

    for other in ReportProfile:
        report = the_report(inventory, {REGISTER: text}, ReportSettings(other))
        assert bool(report.changes) is (other is not profile)


@pytest.mark.parametrize("profile", ReportProfile)
def test_without_a_gpu_the_known_ones_stay_unhealthy_in_any_profile(profile: ReportProfile):
    settings = ReportSettings(profile)
    before = the_report(an_inventory(), {}, settings).register

    report = the_report(Inventory(generation=2), {REGISTER: before, SCORE: "kept"}, settings)

    assert [False, False] == [gpu.healthy for gpu in read_register(report.register)]
    assert {REGISTER: report.register} == report.changes


def test_the_score_is_written_beside_the_register_text_and_only_where_it_differs():
    nothing = the_report(linked(), {}, SCORED)
    half = the_report(linked(), {REGISTER: TEXT}, SCORED)
    other_half = the_report(linked(), {SCORE: SCORES}, SCORED)

    assert {REGISTER: TEXT, SCORE: SCORES} == nothing.changes == half.changes
    assert {REGISTER: TEXT} == other_half.changes
    assert {} == the_report(linked(), {REGISTER: TEXT, SCORE: SCORES}, SCORED).changes
