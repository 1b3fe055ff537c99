"""Prints what the runbook says of the id in a message.

Ids are those of a refusal (HA-4002), of a line of doctor (P-DRIVER) or explain (E-LOCK), of a GPU's
fault (H-079) or of an Event. It reads nothing of the node or the cluster. Exits 4 if there is no
such id.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import agent
from agent.cli.main import OK, NotThere, Subparsers, nearest
from agent.errors import cap
from agent.health.xids import xid_class, xid_name

_ID: Final = "(?:[A-Z]+-[A-Z0-9]+|[A-Z][a-z]+[A-Z][A-Za-z0-9]+)"

_HEADING: Final = re.compile(rf"### (?:Events? |Condition )?({_ID}(?:, {_ID})*)(.*)")
"""A heading of an entry: its ids, and its title."""

_LINK: Final = re.compile(r"\[([^\]]+)\]\([^)\s]+\)")
"""A link of Markdown, of which the text is shown."""

_INNER: Final = re.compile(r"\]\(#([^)\s]+)\)")
"""A link to a section of the runbook."""

_XID: Final = re.compile("(?:h-|xid ?)?([0-9]{1,5})")

_OF_ALL_XIDS: Final = "h-nnn"
"""The entry of XIDs that have none of their own."""

HINT: Final = "`hami-agent runbook ID` prints what the runbook says of an id"
"""The line below answers that have ids."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `runbook`."""
    parser = subparsers.add_parser(
        "runbook", description=__doc__, epilog="example: hami-agent runbook HA-4002"
    )
    parser.add_argument("id", nargs="?", metavar="ID", help="without it: list all ids")


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the entry, or the ids; return the exit code."""
    del environ
    known = entries()
    if args.id is None:
        width = max(map(len, known))
        sys.stdout.writelines(f"{name:<{width}}  {title}\n" for name, (title, _) in known.items())
        return OK

    names = {name.lower(): name for name in known}
    asked = args.id.strip("[]").lower()  # as messages have it
    title = ""

    if of_xid := _XID.fullmatch(asked):
        number, asked = int(of_xid[1]), _OF_ALL_XIDS
        title = f"H-{number:03} XID {number}: {xid_name(number)}; class {xid_class(number)}"

    if asked not in names:
        hint = nearest(asked, known) or "; `hami-agent runbook` lists all"
        raise NotThere(f"the runbook has no entry {cap(args.id, 64)}{hint}")

    text = known[names[asked]][1]
    if title:
        text = title + text[text.index("\n") :]

    sys.stdout.write(text)
    return OK


def entries() -> Mapping[str, tuple[str, str]]:
    """Title and text of each id, in the order of the runbook.

    The text of a section without an id stands below each entry that refers to it.
    """
    home = Path(agent.__file__).parent
    installed = home / "RUNBOOK.md"
    text = (installed if installed.exists() else home.parent / "RUNBOOK.md").read_text("utf-8")
    found: dict[str, tuple[str, str]] = {}
    parts = re.split("^(?=##)", text, flags=re.MULTILINE)
    # By the name that GitHub gives the heading in links.
    sections: dict[str, str] = {}
    for part in parts:
        if not _HEADING.match(part):
            words = re.sub(r"[^\w\- ]", "", part.partition("\n")[0].lstrip("# "))
            sections[words.lower().replace(" ", "-")] = part

    for part in parts:
        if heading := _HEADING.match(part):
            linked = [sections[name] for name in _INNER.findall(part) if name in sections]
            plain = _LINK.sub(r"\1", "".join((part, *linked))).replace("### ", "").rstrip()
            title = heading[2].strip() or part.removeprefix("### ").partition(" ")[0]
            found |= dict.fromkeys(heading[1].split(", "), (title, f"{plain}\n"))

    return found
