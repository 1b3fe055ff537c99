"""Strategy cdi-cri on a node whose CDI specifications have none of the names that answers give.

Every container fails there. Right: such a GPU is not on offer, and `doctor` has a line about CDI.
This machine may have no specification of its own.
"""

from agent.sandbox.lab.cluster import RESOURCE
from tests.cases.box import CaseSandbox, a_container, a_pod, verdict

with CaseSandbox("--agent-flag=--device-list-strategy=cdi-cri") as sandbox:
    sandbox.create(a_pod("cdi", a_container(mem=10)))
    print("pod:", sandbox.wait("cdi")["status"].get("phase"))
    offered = sandbox.node()["status"]["allocatable"].get(RESOURCE, "0")
    print("slices on offer:", offered)
    print("readyz:", sandbox.get("/readyz?verbose").splitlines()[-1])
    said = sandbox.run(*sandbox.doctor, "--device-list-strategy", "cdi-cri")
    print("doctor:", said.strip().splitlines()[-1])
verdict(
    right=offered == "0" and "cdi" in said.lower(),
    wrong="nothing says that the runtime will call the names unresolvable CDI devices",
)
