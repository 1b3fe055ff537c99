"""The texts of RUNBOOK.md by their ids, for `hami-agent runbook` and the page."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

import agent
from agent.errors import cap
from agent.health.judge import xid_class, xid_name

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


def runbook_text(name: str) -> str:
    """The entry of this id, however a message writes it. Raises LookupError: there is none."""
    known = entries()
    names = {one.lower(): one for one in known}
    asked, title = name.strip("[]").lower(), ""
    if of_xid := _XID.fullmatch(asked):
        number, asked = int(of_xid[1]), _OF_ALL_XIDS
        title = f"H-{number:03} XID {number}: {xid_name(number)}; class {xid_class(number)}"

    if asked not in names:
        hint = "`hami-agent runbook` lists all"
        raise LookupError(f"the runbook has no entry {cap(name, 64)}; {hint}")

    text = known[names[asked]][1]
    return title + text[text.index("\n") :] if title else text


@cache
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
