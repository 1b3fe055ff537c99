"""The agent's account is granted what the code asks of the API server, and nothing else."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.shape import tree

ADAPTER = "agent/kube"
"""The only door to the API server: import-linter keeps the library out of everything else."""
EVERYBODYS = {("create", "selfsubjectaccessreviews")}
"""Kubernetes grants it to whoever has a token (ClusterRole system:basic-user)."""
OPTIONAL = {("patch", "nodes/status")}
"""The chart grants it only with `report.nodeCondition` (tests/chart/test_golden.py)."""
OPERATORS = {("get", "pods/exec")}
"""`execute` of the client asks it, which only COMMANDS call."""
COMMANDS = Path("agent/kube/reader.py")
"""What commands ask with the rights of the operator who runs them."""
ADAPTER_NODE = Path("agent/kube/objects.py")
UNINSTALL = "KubeLeftovers"
"""What of it the Job after `helm uninstall` asks, too, which has an account of its own."""
RULE = re.compile(r"^ +resources: \[(.*)\]\n +verbs: \[(.*)\]$", re.MULTILINE)


def asked() -> Iterator[tuple[str, str]]:
    """Verb and resource of every request that the agent can make."""
    for path in tree.modules(ADAPTER):
        if path != COMMANDS:
            yield from asked_in(tree.parsed(path))


def asked_in(part: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(part):
        match node:
            case ast.Call(func=ast.Name(id="ApiRequest")):
                verb, resource, *_ = node.args
                yield literal(verb), literal(resource)
            case ast.Call(func=ast.Attribute(attr="read_list")):
                yield "list", literal(node.args[0])


def literal(argument: ast.expr) -> str:
    value = ast.literal_eval(argument)
    assert isinstance(value, str), "verb and resource are written out where a request is made"
    return value


def granted() -> Iterator[tuple[str, str]]:
    documents = yaml.safe_load_all(tree.text("deploy/manifests/rbac.yaml"))
    (role,) = [one for one in documents if one["kind"] == "ClusterRole"]
    for rule in role["rules"]:
        assert [""] == rule["apiGroups"]
        assert {"apiGroups", "resources", "verbs"} == set(rule), "for all objects of the kind"
        yield from ((verb, resource) for resource in rule["resources"] for verb in rule["verbs"])


def test_every_request_is_granted_and_every_right_is_used():
    assert set(asked()) - EVERYBODYS - OPTIONAL - OPERATORS == set(granted())


def test_only_commands_run_something_in_a_pod():
    callers = (path for path in tree.modules("agent") if "execute" in called_in(tree.parsed(path)))

    assert [COMMANDS] == list(callers)


def test_who_uninstalls_asks_for_what_it_is_granted_and_every_right_is_used():
    rules = RULE.findall(tree.text("deploy/chart/hami-agent/templates/uninstall.yaml"))
    given = {(verb, kind) for kind, verbs in rules for verb in verbs.split(", ")}

    (asks,) = (
        node
        for node in tree.parsed(COMMANDS).body
        if isinstance(node, ast.ClassDef) and node.name == UNINSTALL
    )
    # It writes by methods of the agent's own Node, which call others of that class.
    (node,) = (
        one
        for one in tree.parsed(ADAPTER_NODE).body
        if isinstance(one, ast.ClassDef) and one.name == "KubeApi"
    )
    methods = {
        one.name: one
        for one in node.body
        if isinstance(one, ast.AsyncFunctionDef | ast.FunctionDef)
    }
    parts: dict[str, ast.AST] = {"": asks}
    waiting = called_in(asks) & methods.keys()
    assert waiting
    while waiting:
        name = waiting.pop()
        parts[name] = methods[name]
        waiting |= (called_in(methods[name]) & methods.keys()) - parts.keys()
    # A single Node is read where its own agent's identity asks; the Job lists all of them.
    assert {one for part in parts.values() for one in asked_in(part)} - {("get", "nodes")} == given


def called_in(part: ast.AST) -> set[str]:
    """The names of the methods that it calls."""
    calls = (node.func for node in ast.walk(part) if isinstance(node, ast.Call))
    return {func.attr for func in calls if isinstance(func, ast.Attribute)}


def test_no_right_is_granted_twice():
    assert len(set(granted())) == len(list(granted()))


def test_requests_are_made_in_one_place_only():
    makers = {
        path.parent
        for path in tree.modules("agent")
        for node in ast.walk(tree.parsed(path))
        if isinstance(node, ast.ImportFrom)
        and node.module == "agent.kube.client"
        and "ApiRequest" in {alias.name for alias in node.names}
    }

    assert {Path(ADAPTER)} == makers
