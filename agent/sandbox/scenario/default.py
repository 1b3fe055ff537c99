"""The steps of the default scenario, and running them."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from agent.core.errors import AgentError
from agent.sandbox.api_errors import StatusError
from agent.sandbox.lab.cluster import SandboxCluster
from agent.sandbox.scenario import begin, trouble
from agent.sandbox.scenario.record import Moment, ScenarioRecord, Unmet, promises
from agent.sandbox.scenario.stage import DiskWatch, Stage, SumWatch

Step = Callable[[Stage], Awaitable[None]]

OPENING: Final[Sequence[Step]] = (begin.register, begin.place, begin.use_gpus)
"""The steps with which an interactive sandbox starts."""

DEFAULT: Final[Sequence[Step]] = (
    *OPENING,
    trouble.lose_gpu,
    trouble.restart_kubelet,
    trouble.kill_agent,
    trouble.kill_in_burst,
    trouble.lose_records,
    trouble.idle,
    trouble.stop,
)

FEWEST_GPUS: Final = 3
"""The scenario needs this many: one pod requests two GPUs, and one GPU is lost."""

NEEDED_SLICES: Final = 24
"""Slices that the pods need on the GPUs that stay healthy."""


def open_stage(cluster: SandboxCluster, split_count: int, tell: Callable[[Moment], None]) -> Stage:
    """A new stage. `tell` gets every entry of the timeline."""
    gpus = {state.gpu.uuid: state.gpu for state in cluster.hardware.states}
    sums = SumWatch(cluster, gpus, split_count)
    cluster.kubelet.history.listen(sums.hear)
    disk = DiskWatch(cluster)
    cluster.kubelet.history.listen(disk.hear)
    record = ScenarioRecord(promises(len(gpus), split_count), tell)
    return Stage(cluster, record, gpus, split_count, sums, disk)


FAULTS: Final = (AgentError, StatusError, OSError, ValueError, KeyError)
"""The errors of a step if a broken agent leaves a malformed file or page."""


async def act(stage: Stage, steps: Sequence[Step] = DEFAULT) -> ScenarioRecord:
    """Run the steps until one cannot continue. Claims after it stay unchecked."""
    try:
        for step in steps:
            await step(stage)
    except Unmet as unmet:
        stage.record.note(f"stopped at claim {unmet}")
    except FAULTS as fault:
        stage.record.note(f"stopped: {type(fault).__name__}: {fault}")
    return stage.record
