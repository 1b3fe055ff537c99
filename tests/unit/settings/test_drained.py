"""The scheduler and the resource's name change on a drained node alone."""

import msgspec
import pytest

from agent.errors import SettingsError
from agent.ledger import LastGood, Ledger, SourceFile
from agent.settings.reading import Sources, make_plan, stand_in
from tests.builders import NODE, a_pod_uid, a_row

OLD, NEW = "nvidia.com/gpu", "example.com/vgpu"


def rows(*names: str, resource: str = OLD) -> Ledger:
    """A row of hami mode for each pod of namespace `a`."""
    return Ledger(
        tuple(
            msgspec.structs.replace(
                a_row(pod_uid=a_pod_uid(n), namespace="a", pod=name), resource=resource
            )
            for n, name in enumerate(names)
        )
    )


def said(ledger: Ledger, scheduler: str = "hami", resource: str = OLD) -> str:
    own = f"scheduler: {scheduler}\nsharing: {{resourceName: {resource}}}"
    plan = make_plan(Sources(own=SourceFile("c.yaml", own.encode()), host=NODE))
    try:
        plan.check_rows(ledger)
    except SettingsError as error:
        return str(error)
    return ""


def test_another_name_is_refused_with_its_place_and_what_to_do():
    assert (
        "c.yaml:2:25: sharing.resourceName cannot change from nvidia.com/gpu to example.com/vgpu "
        "while pods hold slices; running pods go on: drain the node (kubectl drain node-1) or "
        "delete the pods that `hami-agent status --by pod` names, or set it back; slices are held "
        "for up to two minutes after their pod has gone"
    ) == said(rows("p"), resource=NEW)


@pytest.mark.parametrize(
    ("kept", "stands_in"),
    [
        ("", True),
        (f"sharing: {{resourceName: {NEW}}}", False),
        ("sharing: 7", False),
        (None, False),
    ],
)
def test_last_good_settings_stand_in_for_those_that_the_rows_refuse(kept, *, stands_in: bool):
    now = Sources(own=SourceFile("c.yaml", f"sharing: {{resourceName: {NEW}}}".encode()))
    copy = None if kept is None else LastGood("0", NODE, own=SourceFile("c.yaml", kept.encode()))
    found = stand_in(copy, now, rows("p"))

    assert stands_in == (found is not None)
    if found is not None:
        found.check_rows(rows("p"))
