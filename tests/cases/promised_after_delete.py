"""A pod of 70,000 MiB is deleted and one of 60,000 MiB runs on the same GPU of 81,559 MiB.

Right: the sum that is shown is the one by which the second pod was let in.
"""

import time

from tests.cases.box import CaseSandbox, a_container, a_pod, verdict

with CaseSandbox() as sandbox:
    uuid = sandbox.gpu_uuid(0)
    sandbox.create(a_pod("before", a_container(mem=70000), gpu=uuid))
    print("before:", sandbox.wait("before")["status"]["phase"])
    sandbox.delete("before")
    sandbox.create(a_pod("after", a_container(mem=60000), gpu=uuid))
    print("after:", sandbox.wait("after")["status"]["phase"])
    time.sleep(2)
    bytes_of = sandbox.metrics(0)
    print(sandbox.run("status", "--socket", sandbox.socket, "0"))
promised = bytes_of["hami_agent_memory_promised_bytes"]
sellable = bytes_of["hami_agent_memory_sellable_bytes"]
print(f"promised {promised / 2**20:,.0f} MiB of {sellable / 2**20:,.0f} MiB")
verdict(right=promised <= sellable, wrong="the sum that is shown counts a pod that is gone")
