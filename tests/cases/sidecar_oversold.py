"""Two pods, each with a GPU sidecar and an app of 30,000 MiB, on one GPU of 81,559 MiB.

HAMi 2.10 places both. Right: the GPU's gauge counts sidecars, and an Event says GpuOversold.
"""

import time

from tests.cases.box import CaseSandbox, a_container, a_pod, verdict

SIDECAR = a_container("side", mem=30000, is_sidecar=True)

with CaseSandbox() as sandbox:
    uuid = sandbox.gpu_uuid(2)
    for name in ("s1", "s2"):
        sandbox.create(a_pod(name, a_container(mem=30000), init=[SIDECAR], gpu=uuid))
        print(name, sandbox.wait(name)["status"]["phase"], flush=True)
    time.sleep(3)
    bytes_of = sandbox.metrics(2)
    events = sandbox.request("GET", "/api/v1/events")["items"]
told = {one["reason"] for one in events if one["involvedObject"]["kind"] == "Node"}
run = bytes_of["hami_agent_container_memory_promised_bytes"]
gauge = bytes_of["hami_agent_memory_promised_bytes"]
print(f"the containers hold {run / 2**20:,.0f} MiB; the GPU's gauge says {gauge / 2**20:,.0f} MiB")
print("Events on the Node:", sorted(told))
verdict(
    right="GpuOversold" in told and gauge >= run,
    wrong="no Event says it, or the GPU's gauge leaves the sidecars out",
)
