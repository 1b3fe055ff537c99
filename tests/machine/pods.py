"""The pods that histories create: their containers, and what a tenant may write on them."""

import dataclasses

from hypothesis import strategies as st

from agent.cluster import ALLOCATED, BIND_PHASE, BIND_TIME, PHASE_ALLOCATING, TO_ALLOCATE, VGPU_NODE
from agent.sandbox.api_errors import Json
from agent.sandbox.kubelet.podloop import RUN_SECONDS
from tests.builders import NODE, a_uuid
from tests.machine.kubelet import RESOURCE

GPU_MIB = 16000
NAMESPACE = "team-a"


@dataclasses.dataclass(frozen=True)
class Box:
    """One container. `count` 0: it asks for no GPU; `mib` 0: for all of its GPUs' memory."""

    kind: str = "app"
    count: int = 1
    mib: int = 6000
    cores: int = 20


@dataclasses.dataclass(frozen=True)
class Shape:
    """A pod. `seconds`: its work ends by itself; `misplaced`: it selects other nodes.

    `forged`: its tenant wrote the scheduler's annotations on it, for so many MiB. `restarts`: its
    restartPolicy.
    """

    boxes: tuple[Box, ...] = (Box(),)
    seconds: int | None = None
    misplaced: bool = False
    forged: int | None = None
    restarts: str = ""


boxes = st.builds(
    Box,
    kind=st.sampled_from(("app", "app", "app", "app", "init", "sidecar")),
    count=st.sampled_from((1, 1, 1, 1, 0, 2)),
    mib=st.sampled_from((6000, 2000, 12000, 0)),
    cores=st.sampled_from((20, 0, 60)),
)


def _with_an_app(found: list[Box]) -> tuple[Box, ...]:
    """In the order of a spec; every pod has an app container, whether it needs GPUs or not."""
    inits = [box for box in found if box.kind != "app"]
    apps = [box for box in found if box.kind == "app"] or [Box()]
    return (*inits, *apps)[-3:]


shapes = st.builds(
    Shape,
    boxes=st.lists(boxes, min_size=1, max_size=3).map(_with_an_app),
    seconds=st.sampled_from((None, None, None, 2, 30)),
    misplaced=st.sampled_from((False, False, False, False, True)),
    forged=st.sampled_from((None, None, None, 1, 12000)),
)


def a_pod_object(name: str, shape: Shape, stamp: int, **spec: object) -> Json:
    """The pod as its owner sends it; `stamp` is Unix time, for a forged bind-time."""
    notes = {} if shape.seconds is None else {RUN_SECONDS: str(shape.seconds)}
    if shape.forged is not None:
        notes |= forged(shape, shape.forged, stamp)
    containers = [_container(f"c{place}", box) for place, box in enumerate(shape.boxes)]
    inits = [one for one, box in zip(containers, shape.boxes, strict=True) if box.kind != "app"]
    apps = [one for one, box in zip(containers, shape.boxes, strict=True) if box.kind == "app"]
    selector: Json = {"nodeSelector": {"zone": "elsewhere"}} if shape.misplaced else {}
    selector |= {"restartPolicy": shape.restarts} if shape.restarts else {}
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "annotations": notes},
        "spec": {"initContainers": inits, "containers": apps} | selector | spec,
    }


def forged(shape: Shape, mib: int, stamp: int) -> dict[str, str]:
    """What the scheduler writes, written by somebody else."""
    groups = "".join(
        "".join(f"{a_uuid(n)},NVIDIA,{mib},1:" for n in range(box.count)) + ";"
        for box in shape.boxes
    )
    return {
        VGPU_NODE: NODE,
        ALLOCATED: groups,
        TO_ALLOCATE: groups,
        BIND_PHASE: PHASE_ALLOCATING,
        BIND_TIME: str(stamp - 3600),
    }


def _container(name: str, box: Box) -> Json:
    limits: dict[str, str] = {}
    if box.count:
        limits[RESOURCE] = str(box.count)
        limits[f"{RESOURCE}cores"] = str(box.cores)
        if box.mib:
            limits[f"{RESOURCE}mem"] = str(box.mib)
    restart = {"restartPolicy": "Always"} if box.kind == "sidecar" else {}
    return {"name": name, "resources": {"limits": limits}} | restart


plain_shapes = st.sampled_from(
    (
        Shape((Box(mib=4000),)),
        Shape((Box(mib=4000),)),
        Shape((Box(mib=12000),)),
        Shape((Box(mib=2000), Box(mib=2000, cores=0))),
        Shape((Box("init", mib=6000), Box(mib=2000))),
        Shape((Box(mib=2000), Box(count=0), Box(mib=2000))),
    )
)
