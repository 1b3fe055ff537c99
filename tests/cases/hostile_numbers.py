"""A tenant writes numbers into its own region that no GPU can have.

Right: they are not shown as use; the container is unread, with the reason.
"""

import re
import time

from tests.cases.box import CaseSandbox, a_container, a_pod, a_raw_region, put_region, verdict

with CaseSandbox() as sandbox:
    uuid = sandbox.gpu_uuid(0)
    sandbox.create(a_pod("liar", a_container(mem=4096), gpu=uuid))
    uid = sandbox.wait("liar")["metadata"]["uid"]
    for old in (sandbox.dir / "hook/vgpu/containers" / f"{uid}_main").glob("*.cache"):
        old.unlink()
    numbers = [(2**62, 2**62)] * 60
    raw = a_raw_region([(uuid, 4096 << 20, 30)], numbers, last=int(time.time()))
    put_region(sandbox.dir / "hook", f"{uid}_main", raw)
    time.sleep(12)
    pattern = r"^[a-z_]*(?:bytes|ratio)[a-z_]*\{.*liar.*\} (.*)$"
    large = [
        one
        for one in re.findall(pattern, sandbox.get("/metrics"), re.MULTILINE)
        if float(one) > 1e12
    ]
    shown = sandbox.run("status", "--socket", sandbox.socket, "--by", "pod")
    print(shown, *large)
verdict(
    right=not large and "not believable" in shown,
    wrong="impossible numbers of a region are shown as use",
)
