"""A container gets GPUs of two models.

HAMi-core takes CUDA_DEVICE_MEMORY_LIMIT_<i> by CUDA's ordinal, and CUDA numbers the fastest GPU
first unless CUDA_DEVICE_ORDER=PCI_BUS_ID. Right: each GPU has the limit that the scheduler wrote.
"""

import re
import time

from agent.sandbox.lab.cluster import RESOURCE
from tests.cases.box import CaseSandbox, a_container, a_pod, verdict

with CaseSandbox("--profile", "t4") as sandbox:
    sandbox.simulate("add", "--profile", "h100")
    sandbox.until(lambda: sandbox.node()["status"]["allocatable"].get(RESOURCE) == "40")
    time.sleep(3)
    found = re.findall(
        r"^\d+ +(GPU-\S+) +(Tesla T4|NVIDIA H100)", sandbox.simulate("list"), re.MULTILINE
    )
    model = dict(found)
    sandbox.create(a_pod("mix", a_container(slices=4, mem_percentage=40)))
    pod = sandbox.wait("mix")
    answer = sandbox.answer(pod["metadata"]["uid"])

found = re.findall(rb"CUDA_DEVICE_MEMORY_LIMIT_(\d)\x12.(\d+)m", answer)
given = {int(place): int(mib) for place, mib in found}
(visible,) = re.findall(rb"NVIDIA_VISIBLE_DEVICES\x12.{1,2}(GPU-[0-9a-f,GPU-]+)", answer)
notes = pod["metadata"]["annotations"]
wrote = dict(re.findall(r"(GPU-[0-9a-f-]+),NVIDIA,(\d+)", notes["hami.io/vgpu-devices-allocated"]))
order = visible.decode().split(",")
if b"CUDA_DEVICE_ORDER" not in answer:
    order.sort(key=lambda uuid: "H100" not in model[uuid])
for place, uuid in enumerate(order):
    mib = given[place]
    print(f"CUDA device {place}: {model[uuid]}: {mib} MiB, the scheduler wrote {wrote[uuid]}")
verdict(
    right=all(given[place] == int(wrote[uuid]) for place, uuid in enumerate(order)),
    wrong="limits are those of other GPUs: the answer does not set CUDA_DEVICE_ORDER=PCI_BUS_ID",
)
