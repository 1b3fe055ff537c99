"""A pod succeeded two hours ago. The kubelet's List names ended pods too, as before 1.34, or not.

Right: its row is closed in each case, though the pod's object stays.
"""

import datetime as dt

from agent.cluster import Phase, PodTable
from agent.ledger import ContainerHolding, Holding, Ledger
from agent.model import SliceId
from agent.reconcile.rules import ReconcileFacts, judge_by_scheduler
from agent.sandbox.lab.cluster import RESOURCE
from tests.builders import G1, NOON, a_pod, a_row
from tests.cases.box import verdict
from tests.unit.core.allocation.matching_scene import NOW_KUBELET, annotated

SLICE = SliceId(f"{G1}-0")
POD = a_pod(annotations=annotated(), phase=Phase.SUCCEEDED)
ROW = a_row(epoch=NOW_KUBELET, confirmed=True, slice_ids=(SLICE,))


def is_closed(*held: dict[str, frozenset[SliceId]]) -> bool:
    """Whether the row is closed if the kubelet lists the pod with these slices."""
    holdings = tuple(
        Holding(POD.namespace, POD.name, (ContainerHolding("main", ids),)) for ids in held
    )
    pods, now = PodTable({POD.uid: POD}, (), synced=True), NOON + dt.timedelta(hours=2)
    seen = ReconcileFacts(pods, holdings, NOW_KUBELET, now, complete=True)
    return bool(judge_by_scheduler(Ledger((ROW,)), seen, RESOURCE).over)


forms = {
    "not listed": is_closed(),
    "listed with its slice": is_closed({RESOURCE: frozenset({SLICE})}),
    "listed without slices": is_closed({}),
}
for form, closed in forms.items():
    print(f"{form}: row closed: {closed}")
verdict(
    right=all(forms.values()),
    wrong="row, series, allocated memory and directory stay until the pod's object is deleted",
)
