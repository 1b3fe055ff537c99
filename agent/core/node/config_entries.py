"""Judges the names of Nodes in settings: whether such a Node exists."""

import difflib
import enum
from collections.abc import Iterator, Mapping
from typing import Final

from agent.core.errors import cap
from agent.core.node.findings import Finding, PreflightCheck, counted

LIKENESS: Final = 0.8
"""From this ratio on, a name may be a misspelt name of this Node."""
ASKED: Final = 32
"""The most names for which the API server is asked."""


class NamedNode(enum.Enum):
    """Whether a Node of a name in the settings exists."""

    THERE = "there"
    MISSING = "missing"
    UNSEEN = "unseen"
    """This account may not look, or was not asked."""


def judge_entries(node: str, names: Mapping[str, NamedNode], where: str) -> Iterator[Finding]:
    """Judge the names in nodeconfig and in profiles. `where`: the files, for messages."""
    check = PreflightCheck.ENTRIES
    lost = False
    for name, state in names.items():
        alike = node not in names and is_alike(name, node)
        if state is NamedNode.THERE or (state is NamedNode.UNSEEN and not alike):
            continue
        lost = True
        meant = f"; did you mean {node}?" if alike else ""
        said = f"an entry for {cap(name, 64)} matches no Node{meant}"
        if state is NamedNode.UNSEEN:
            said = f"an entry for {cap(name, 64)} does not match this Node{meant}"
        advice = "write the Node's name as `kubectl get nodes` shows it, or remove the entry"
        yield Finding.note(check, where, said, advice)
    if not lost:
        unseen = sum(state is NamedNode.UNSEEN for one, state in names.items() if one != node)
        rest = f"whether {unseen} of them exist was not asked" if unseen else "each exists"
        said = f"{counted(len(names), 'Node')} named; {rest}" if names else "no entry names a Node"
        yield Finding.ok(check, where, said)


def is_alike(name: str, node: str) -> bool:
    """True if `name` may be meant for the Node `node`: another case, domain or spelling."""
    one, other = name.lower(), node.lower()
    if one.partition(".")[0] == other.partition(".")[0]:
        return True
    # Nodes of one pool differ by their number alone.
    if one.rstrip("0123456789") == other.rstrip("0123456789"):
        return False
    return difflib.SequenceMatcher(None, one, other).ratio() >= LIKENESS
