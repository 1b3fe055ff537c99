"""A pod with the label hami.io/webhook: ignore. HAMi's chart lets it pass the webhook unchanged."""

from tests.cases.box import CaseSandbox, a_container, a_pod, verdict

with CaseSandbox() as sandbox:
    pod = a_pod("left-alone", a_container(mem=512))
    pod["metadata"]["labels"] = {"hami.io/webhook": "ignore"}
    sandbox.create(pod)
    stored = sandbox.request("GET", "/api/v1/namespaces/demo/pods/left-alone")
    name = stored["spec"].get("schedulerName")
    print("schedulerName:", name)
verdict(right=name != "hami-scheduler", wrong="the webhook changed a pod that it must not see")
