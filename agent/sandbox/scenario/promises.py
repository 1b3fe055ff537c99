"""Every claim of the default scenario, in the order in which they are checked."""

from collections.abc import Mapping

from agent.sandbox.scenario.workloads import PLACED


def promises(gpus: int, split_count: int) -> Mapping[str, str]:
    """Claim id → sentence, for a node with that many GPUs and slices for each."""
    whole, rest = gpus * split_count, (gpus - 1) * split_count
    return {
        "registered": "the agent registers with the kubelet",
        "allocatable": f"{whole} slices are allocatable on the Node",
        "annotation": f"the register annotation names {gpus} healthy GPUs",
        **_placing(),
        "too-big.pending": "a pod that cannot fit stays Pending with a reason",
        "requests": "each GPU pod costs two writes, one read for each answer and one more",
        "used": "the metrics say what each container uses of its GPUs",
        "xid.allocatable": f"one GPU is gone: {rest} allocatable",
        "xid.annotation": "the register annotation shows it as unhealthy",
        "xid.running": "the pod on it stays Running",
        "xid.avoided": "no new pod is placed on it",
        "kubelet.allocatable": f"after the kubelet's restart {rest} are allocatable",
        "kubelet.untouched": "no container was affected or allocated again",
        "kill.allocatable": f"after the SIGKILL {rest} are allocatable, never {whole}",
        "kill.rows": "the new agent has every row of the ledger",
        "kill.untouched": "no container was affected or allocated again",
        "burst.pods": "every pod is served, or was rejected in the gap",
        "burst.edits": "every pod that is served has what the scheduler wrote",
        "burst.durable": "no acknowledged answer is lost",
        "burst.lock": "the node lock is free again",
        "replay.edits": "a repeated Allocate gets the same answer, byte for byte",
        "disk_first": "every answer was on disk before the kubelet had it",
        "sums": "no GPU was ever oversold",
        "idle": "when idle: no write, no read, two watches",
        "stop": "SIGTERM ends the agent cleanly",
    }


def _placing() -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name in (workload.name for workload in PLACED):
        found[f"{name}.running"] = f"pod {name} runs"
        found[f"{name}.edits"] = f"pod {name} has what the scheduler wrote"
        found[f"{name}.settled"] = f"pod {name} is settled, the lock is free"
    return found
