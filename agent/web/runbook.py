"""The texts of RUNBOOK.md by their ids, for `hami-agent runbook` and the page."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

import agent
from agent.errors import cap
from agent.health.judge import STRONGER, xid_class, xid_name

_ID: Final = "(?:[A-Z]+-[A-Z0-9]+|[A-Z][a-z]+[A-Z][A-Za-z0-9]+)"
_HEADING: Final = re.compile(rf"### (?:Events? |Condition )?({_ID}(?:, {_ID})*)(.*)")
"""A heading of an entry: its ids, and its title."""

_ALERT: Final = re.compile(r"^\| `(HamiAgent\w+)` \| (\w+) \| (.*) \|$", re.MULTILINE)
"""The row of an alert, which is an entry too: its name, how severe it is, and where to look."""

_LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
"""A link of Markdown, of which the text is shown."""


def runbook_text(name: str) -> str:
    """The entry of this id, however a message writes it. Raises LookupError: there is none."""
    known, asked = entries(), name.strip("[]").upper()
    text = next((text for one, (_, text) in known.items() if one.upper() == asked), "")
    # All XIDs have one entry, and each a title of its own.
    if of_xid := re.fullmatch("(?:H-|XID ?)?([0-9]{1,5})", asked):
        number, text = int(of_xid[1]), known["H-NNN"][1].partition("\n")[2]
        title = f"{xid_name(number)}; class {xid_class(number)}"
        title += f": {STRONGER[number]} the node" if number in STRONGER else ""
        text = f"H-{number:03} XID {number}: {title}\n{text}"
    if not text:
        said = f"the runbook has no entry {cap(name, 64)}"
        raise LookupError(f"{said}; `hami-agent runbook` lists all")
    return text


@cache
def entries() -> Mapping[str, tuple[str, str]]:
    """Title and text of each id, in the order of the runbook.

    It is read once, from where the code was loaded, so a page may wait for it. The text of a
    section without an id stands below each entry that refers to it; below an alert, of any section.
    """
    home = Path(agent.__file__).parent
    installed = home / "RUNBOOK.md"
    text = (installed if installed.exists() else home.parent / "RUNBOOK.md").read_text("utf-8")
    found: dict[str, tuple[str, str]] = {}
    sections: dict[str, str] = {}
    text = _ALERT.sub(r"### \1 Alert, \2\n\n\3\n", text)
    parts = re.split("^(?=##)", text, flags=re.MULTILINE)
    for part in parts:
        # By the name that GitHub gives the heading in links.
        words = re.sub(r"[^\w\- ]", "", part.partition("\n")[0].lstrip("# "))
        sections[f"#{words.lower().replace(' ', '-')}"] = part

    for part in parts:
        if heading := _HEADING.match(part):
            linked = [sections.get(place, "") for _, place in _LINK.findall(part)]
            is_alert = " Alert, " in heading[0]  # an operator has no id then: all is shown at once
            whole = part + "".join(one for one in linked if is_alert or not _HEADING.match(one))
            plain = _LINK.sub(r"\1", whole).replace("### ", "").rstrip()
            title = heading[2].strip() or part.removeprefix("### ").partition(" ")[0]
            found |= dict.fromkeys(heading[1].split(", "), (title, f"{plain}\n"))

    return found
