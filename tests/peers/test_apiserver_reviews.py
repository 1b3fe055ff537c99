"""Whoever asks the API server, or the model of it, is told what he may do."""

import pytest

from tests.peers.lab.identities import NODE
from tests.peers.lab.servers import OTHER_NODE, Server


def review(verb: str, resource: str, name: str = "", selector: str = "") -> dict[str, object]:
    base, _, part = resource.partition("/")
    asked: dict[str, object] = {"verb": verb, "resource": base}
    asked |= {"subresource": part} if part else {}
    asked |= {"name": name} if name else {}
    asked |= {"fieldSelector": {"rawSelector": selector}} if selector else {}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }


OWN_PODS_ONLY = f"spec.nodeName={NODE}"
# Admission, which keeps a node from patching another one, has no part in a review.
REVIEWED = [
    (review("watch", "nodes", NODE), (True, True)),
    (review("patch", "nodes", NODE), (True, True)),
    (review("get", "nodes", OTHER_NODE), (False, True)),
    (review("patch", "nodes", OTHER_NODE), (True, True)),
    (review("list", "pods", selector=OWN_PODS_ONLY), (True, True)),
    (review("watch", "pods", selector=OWN_PODS_ONLY), (True, True)),
    (review("list", "pods"), (False, True)),
    (review("patch", "pods/status"), (True, True)),
    (review("patch", "pods"), (False, False)),
    (review("create", "events"), (True, True)),
    (review("delete", "events"), (False, False)),
]


@pytest.mark.parametrize(("asked", "allowed"), REVIEWED)
async def test_a_node_and_the_account_are_told_what_they_may(
    server: Server, asked: dict[str, object], allowed: tuple[bool, bool]
):
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

    answers = [await user.ask("POST", path, asked) for user in (server.node, server.account)]

    assert allowed == tuple(one.body["status"]["allowed"] for one in answers)
    assert {201} == {one.code for one in answers}
