"""A node with GPUs of all sorts, for what each scheduler reads of it."""

from agent.model import Condition, Inventory
from tests.builders import a_gpu, a_health, a_shared_gpu, an_inventory


def inventory() -> Inventory:
    """Another NUMA node, oversold memory, an old name, an ill GPU and an odd name."""
    return an_inventory(
        gpus=[
            a_shared_gpu(gpu=a_gpu(index=0, numa=None)),
            a_shared_gpu(
                gpu=a_gpu(index=1, numa=1),
                registered_mib=122338,
                core_percent=114,
                split_count=7,
            ),
            a_shared_gpu(
                gpu=a_gpu(index=2, name="Tesla P4", memory_mib=7680),
                health=a_health(condition=Condition.BAD),
            ),
            a_shared_gpu(
                gpu=a_gpu(index=3, name='NVIDIA A<B>&C "é"', memory_mib=16384), mode="mps"
            ),
            a_shared_gpu(gpu=a_gpu(index=4), present=False),
        ]
    )
