"""HAMi-core limits neither a pod of the runtime class gvisor nor one that switches it off.

Right: every face marks both, and not the pod beside them.
"""

import re

from tests.cases.box import CaseSandbox, a_container, a_pod, verdict

OFF = {"name": "CUDA_DISABLE_CONTROL", "value": "true"}
KEPT, FREE = {"limited"}, {"sandboxed", "uncontrolled"}

with CaseSandbox() as sandbox:
    sandboxed = a_pod("sandboxed", a_container(mem=1000))
    sandboxed["spec"]["runtimeClassName"] = "gvisor"
    sandbox.create(sandboxed)
    sandbox.create(a_pod("uncontrolled", a_container(mem=1000) | {"env": [OFF]}))
    sandbox.create(a_pod("limited", a_container(mem=1000)))
    for name in KEPT | FREE:
        sandbox.wait(name)
    pods = sandbox.run("status", "--socket", sandbox.socket, "--by", "pod")
    marked = {
        "explain": {n for n in KEPT | FREE if "not kept: " in sandbox.run("explain", f"demo/{n}")},
        "status": set(re.findall(r"nothing keeps the limits of demo/(\w+)/main", pods)),
        "page": set(re.findall(r"demo/(\w+) <i>main</i><strong> Nothing keeps", sandbox.get("/"))),
        "metrics": set(
            re.findall(r'limits_info\{.*keeper="none".*pod="(\w+)"', sandbox.get("/metrics"))
        ),
    }
for face, names in marked.items():
    print(face, sorted(names))
wrong = [face for face, names in marked.items() if names != FREE]
verdict(right=not wrong, wrong=f"limits that nothing keeps are shown as kept by {wrong}")
