#!/usr/bin/env python3
"""Takes what the agents wrote off the Nodes, once their pods are gone: annotations, a condition.

    uninstall.py NAMESPACE LABEL_SELECTOR_OF_THE_PODS

A pod that does not end keeps its own Node as it is, and no other. On a Node without a kubelet a pod
stays for ever, but nothing runs it and its account is gone: such a Node is cleaned, too.

Another device plugin may have followed already: an annotation that it wrote since is its own. The
API server keeps who wrote what (managedFields).
"""

import http.client
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WRITER = "hami-agent"
OWN = "hami-agent/"
REGISTER = "hami.io/node-nvidia-register"
HANDSHAKE = "hami.io/node-handshake"
REPORT = (REGISTER, "hami.io/node-nvidia-score", HANDSHAKE)
CONDITION = "GpuDegraded"
FORGOTTEN = {"status": {"conditions": [{"type": CONDITION, "$patch": "delete"}]}}
ONE = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
WHOLE = "application/json"
PATIENCE = 90.0
"""Seconds for the agents' pods to end."""
PAUSE = 1.0
TRIES = 5
CONFLICT = 409
GONE = 404
BY_HAND = "clean them by hand when it is gone: deploy/README.md, Uninstall"


class Api:
    """The API server, as this pod's account."""

    def __init__(self, server: str, token: str, context: ssl.SSLContext | None) -> None:
        self._server = server
        self._token = token
        self._context = context

    def ask(self, path: str, accept: str = ONE, patch: object = None) -> dict[str, Any]:
        """The object of the answer. Raises urllib.error.HTTPError for a refusal."""
        # A status has lists that are merged by key.
        merge = "strategic-merge" if path.endswith("/status") else "merge"
        request = urllib.request.Request(  # noqa: S310 -- the scheme is ours
            self._server + path,
            data=None if patch is None else json.dumps(patch).encode(),
            method="GET" if patch is None else "PATCH",
            headers={
                "Authorization": f"Bearer {self._token}",
                "Accept": accept,
                "Content-Type": f"application/{merge}-patch+json",
            },
        )
        with urllib.request.urlopen(request, timeout=10, context=self._context) as answer:  # noqa: S310 -- as above
            found: dict[str, Any] = json.load(answer)
            return found

    def items(self, path: str, accept: str = LIST, **query: str) -> Iterator[dict[str, Any]]:
        """All objects of a list, page by page, with as much of them as `accept` says."""
        more = ""
        while True:
            page = {**query, "limit": "250"} | ({"continue": more} if more else {})
            answer = self.ask(f"{path}?{urllib.parse.urlencode(page)}", accept)
            # An empty list of metadata has null there.
            yield from answer["items"] or ()
            more = answer.get("metadata", {}).get("continue") or ""
            if not more:
                return


def main(
    namespace: str, selector: str, api: Api, patience: float = PATIENCE, pause: float = PAUSE
) -> int:
    """Wait, then clean every Node without an agent. The exit code: 0, or 1: something is left."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    ends = time.monotonic() + patience  # noqa: TID251 -- there is no loop here
    stuck: dict[str, str] = {}
    while any(True for _ in api.items(path, labelSelector=selector)):
        if time.monotonic() > ends:  # noqa: TID251 -- as above
            stuck = occupied(api, path, selector)
            break
        time.sleep(pause)  # noqa: TID251 -- as above
    nodes = [node["metadata"] for node in api.items("/api/v1/nodes")]
    failed = [one["name"] for one in nodes if one["name"] not in stuck and not clean(api, one)]
    if failed:
        say(f"something is left on: {', '.join(failed)}")
    if stuck:
        pods = ", ".join(f"{node} (pod {pod})" for node, pod in sorted(stuck.items()))
        say(f"not touched, for an agent that does not end would write again: {pods}; {BY_HAND}")
    return 1 if failed or stuck else 0


def occupied(api: Api, path: str, selector: str) -> dict[str, str]:
    """The Nodes on which an agent may be alive, each with its pod."""
    pods = {
        pod["spec"]["nodeName"]: pod["metadata"]["name"]
        for pod in api.items(path, WHOLE, labelSelector=selector)
        if pod["spec"].get("nodeName")
    }
    return {node: pod for node, pod in pods.items() if has_kubelet(api, node)}


def has_kubelet(api: Api, name: str) -> bool:
    """Whether a kubelet reports from this Node: it is the one that ends pods."""
    try:
        node = api.ask(node_path(name), WHOLE)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == GONE:
            return False
        raise
    conditions = node.get("status", {}).get("conditions") or ()
    # False is a word of the kubelet's own; Unknown is said by others, when it has fallen silent.
    return any(one["type"] == "Ready" and one["status"] != "Unknown" for one in conditions)


def node_path(name: str) -> str:
    """Where a Node lies."""
    return f"/api/v1/nodes/{urllib.parse.quote(name, safe='')}"


def clean(api: Api, node: dict[str, Any]) -> bool:
    """Remove what is ours from one Node; False, and a word about it: something is left."""
    path = node_path(node["name"])
    try:
        if wrote_condition(node):
            api.ask(f"{path}/status", patch=FORGOTTEN)
            say(f"{node['name']}: removed the condition {CONDITION}")
            node = api.ask(path)["metadata"]
        return cleaned(api, path, node)
    except urllib.error.HTTPError as error:
        error.close()
        say(f"{node['name']}: {error}")
        return error.code == GONE
    except (OSError, http.client.HTTPException, ValueError) as error:
        say(f"{node['name']}: {error}")
    return False


def cleaned(api: Api, path: str, node: dict[str, Any]) -> bool:
    """Whether our annotations could be removed; a change in between is looked at anew."""
    for _ in range(TRIES):
        keys = ours(node)
        if not keys:
            return True
        version = node["resourceVersion"]
        patch = {"metadata": {"resourceVersion": version, "annotations": dict.fromkeys(keys)}}
        try:
            api.ask(path, patch=patch)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != CONFLICT:
                raise
        else:
            say(f"{node['name']}: removed {', '.join(keys)}")
            return True
        node = api.ask(path)["metadata"]
    return False


def ours(node: dict[str, Any]) -> list[str]:
    """The annotations that the agent wrote last."""
    present = node.get("annotations") or {}
    own = [key for key in present if key.startswith(OWN)]
    # A plugin reports; what the scheduler answers to that says nothing of who reported.
    reported = str(present.get(HANDSHAKE, "")).startswith("Reported")
    followed = reported and not wrote(node, HANDSHAKE)
    if wrote(node, REGISTER) and not followed:
        own += [key for key in REPORT if key in present]
    return own


def wrote(node: dict[str, Any], key: str) -> bool:
    """Whether the agent was the last to change this annotation."""
    fields = (
        entry.get("fieldsV1", {}).get("f:metadata", {}).get("f:annotations", {})
        for entry in node.get("managedFields") or ()
        if entry.get("manager") == WRITER
    )
    return any(f"f:{key}" in one for one in fields)


def wrote_condition(node: dict[str, Any]) -> bool:
    """Whether the agent has written its condition of the Node."""
    fields = (
        entry.get("fieldsV1", {}).get("f:status", {}).get("f:conditions", {})
        for entry in node.get("managedFields") or ()
        if entry.get("manager") == WRITER
    )
    return any(f'k:{{"type":"{CONDITION}"}}' in one for one in fields)


def say(text: str) -> None:
    """One line for the pod's log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def in_cluster() -> Api:
    """The API server of this pod; it needs no DNS."""
    environ = os.environ  # noqa: TID251 -- Kubernetes' own variables
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ["KUBERNETES_SERVICE_PORT"]
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    return Api(server, (ACCOUNT / "token").read_text(encoding="ascii"), context)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3], in_cluster()))  # noqa: TID251 -- a program of its own
