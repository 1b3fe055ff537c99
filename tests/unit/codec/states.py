"""States for tests of the state file: hypothesis strategies, and one that shows every field."""

import datetime as dt
from typing import Any

import msgspec
from hypothesis import strategies as st

from agent.cluster import PodUid, Role
from agent.ledger import (
    PLAIN,
    ContainerEdits,
    ContainerKey,
    Decider,
    Holder,
    KubeletEpoch,
    Ledger,
    MountEdit,
    NodeEdit,
    Row,
    State,
)
from agent.model import Condition, GpuUuid, Health, Share, SliceId
from tests.builders import G1, G2, NOON, POD_UID, a_health

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
MOMENTS = st.datetimes(
    min_value=dt.datetime(1970, 1, 1),  # noqa: DTZ001 -- hypothesis wants it naive
    max_value=dt.datetime(2999, 1, 1),  # noqa: DTZ001
    timezones=st.just(dt.UTC),
)
NUMBERS = st.integers(0, 2**31 - 1)
PAIRS = st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple)
EPOCHS = st.builds(KubeletEpoch, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
EDITS = st.builds(
    ContainerEdits,
    envs=PAIRS,
    mounts=st.lists(st.builds(MountEdit, TEXT, TEXT, st.booleans()), max_size=2).map(tuple),
    nodes=st.lists(st.builds(NodeEdit, TEXT, TEXT, TEXT), max_size=2).map(tuple),
    annotations=PAIRS,
    cdi_names=st.lists(TEXT, max_size=2).map(tuple),
)
SHARES = st.lists(st.builds(Share, TEXT.map(GpuUuid), NUMBERS, NUMBERS), max_size=2).map(tuple)
IDS = st.lists(TEXT.map(SliceId), max_size=2).map(tuple)
HOLDERS = st.builds(Holder, TEXT, TEXT, TEXT)


def scheduled(holder: Holder, uid: PodUid, **others: Any) -> Row:
    """A row of hami mode: its holder is known from the first."""
    return Row(ContainerKey(uid, holder.container), holder, **others)


def plain(holder: Holder | None, uid: PodUid, *, confirmed: bool, **others: Any) -> Row:
    """A row of plain mode: whoever is known to hold it is on the kubelet's books."""
    key, is_known = ContainerKey(uid, PLAIN), confirmed or holder is not None
    return Row(key, holder, decided_by=Decider.KUBELET, confirmed=is_known, **others)


ROWS = st.builds(
    scheduled,
    HOLDERS,
    TEXT.map(PodUid),
    role=st.sampled_from(Role),
    group=st.integers(0, 99),
    shares=SHARES,
    slice_ids=IDS,
    edits=EDITS,
    answered_at=MOMENTS,
    epoch=EPOCHS,
    confirmed=st.booleans(),
    offered=st.booleans(),
    priority=st.integers(-(2**31), 2**31 - 1),
    live_limits=SHARES,
)
PLAIN_ROWS = st.builds(
    plain,
    st.none() | HOLDERS,
    TEXT.map(PodUid),
    slice_ids=IDS,
    shares=SHARES,
    edits=EDITS,
    answered_at=MOMENTS,
    epoch=EPOCHS,
    confirmed=st.booleans(),
    adopted=st.booleans(),
    live_limits=SHARES,
)
HEALTHS = st.builds(
    Health,
    condition=st.sampled_from(Condition),
    since=MOMENTS,
    cause=TEXT,
    text=TEXT,
    xid=st.none() | NUMBERS,
    needs_reset=st.booleans(),
    serving=st.booleans(),
    passed_probes=NUMBERS,
    action=TEXT,
    runbook=TEXT,
    needs_reboot=st.booleans(),
    bouts=NUMBERS,
    recovered_at=st.none() | MOMENTS,
    failures=st.lists(MOMENTS, max_size=3).map(tuple),
    failed_in_row=NUMBERS,
)
STATES = st.builds(
    State,
    generation=NUMBERS,
    boot_id=TEXT,
    machine_id=TEXT,
    ledger=st.builds(
        Ledger,
        rows=st.tuples(st.lists(ROWS, max_size=2), st.lists(PLAIN_ROWS, max_size=2)).map(
            lambda lists: (*lists[0], *lists[1])
        ),
    ),
    health=st.dictionaries(TEXT.map(GpuUuid), HEALTHS, max_size=2),
    booted_at=st.none() | MOMENTS,
)


def a_full_state() -> State:
    """A state in which no field of a row's kind has its default."""
    row = Row(
        key=ContainerKey(POD_UID, "main"),
        holder=Holder("team-a", "train-0", "main"),
        role=Role.SIDECAR,
        group=2,
        shares=(Share(G1, 3000, 30), Share(G2, 0, 0)),
        slice_ids=(SliceId(f"{G1}-4"), SliceId(f"{G2}-0")),
        edits=ContainerEdits(
            envs=(("NVIDIA_VISIBLE_DEVICES", G1),),
            mounts=(
                MountEdit("/usr/local/vgpu", f"/usr/local/vgpu/containers/{POD_UID}_main", False),
            ),
            nodes=(NodeEdit("/dev/nvidia0", "/dev/nvidia0", "rw"),),
            annotations=(("a", "ü"),),
            cdi_names=("vendor.com/gpu=0",),
        ),
        answered_at=NOON.replace(microsecond=123456),
        epoch=KubeletEpoch(7, 1788264000123456789),
        confirmed=True,
        offered=True,
        resource="example.com/vgpu",
        lock="2026-09-01T12:00:00Z,team-a,train-0",
        priority=0,
        live_limits=(Share(G1, 4000, 40), Share(G2, 500, 5)),
    )
    by_ids = Row(
        key=ContainerKey(PodUid("0123456789abcdef" * 2), PLAIN),
        decided_by=Decider.KUBELET,
        slice_ids=(SliceId(f"{G2}-3"),),
        shares=(Share(G2, 8155, 0),),
        edits=ContainerEdits(envs=(("NVIDIA_VISIBLE_DEVICES", G2),)),
        answered_at=NOON,
        epoch=KubeletEpoch(7, 1788264000123456789),
        holder=Holder("team-b", "eval-0", "main"),
        confirmed=True,
        adopted=True,
        resource="example.com/former",
        live_limits=(Share(G2, 100, 10),),
    )
    ledger = Ledger((row, by_ids))
    health = msgspec.structs.replace(
        a_health(condition=Condition.BAD, cause="xid", text="XID 79", xid=79),
        action="reset",
        runbook="H-079",
        needs_reset=True,
        bouts=2,
        recovered_at=NOON,
        failures=(NOON,),
        failed_in_row=1,
    )
    return State(3, "boot-1", "machine-1", ledger, {G1: health}, booted_at=NOON)
