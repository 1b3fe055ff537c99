"""What the documents tell people to type."""

import re
import shlex
from collections.abc import Iterator

from tests.shape import tree

DOCUMENTS = (
    "README.md",
    "BENCHMARKS.md",
    "COMPARISON.md",
    "COMPATIBILITY.md",
    "CONTRIBUTING.md",
    "GUIDE.md",
    "RUNBOOK.md",
    "SETTINGS.md",
)
TOOLS = (
    "make|helm|kubectl|hami-agent|systemctl|journalctl|kill|sed|skopeo|ctr|docker|python3|nvidia"
)
BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TYPED = re.compile(
    r"^(?:sudo |[A-Z_]+=(?:'[^']*'|\S+) )*"
    rf"(?:(?:{TOOLS})[\w-]* |systemd-run |(?:\.venv/bin|systemd|deploy)/\w)"
)


def told(document: str) -> set[str]:
    """What it tells to type, in blocks and in sentences, without the remarks behind."""
    text = tree.text(document)
    blocks = (block for language, block in BLOCKS.findall(text) if language in {"", "sh"})
    block = "".join(blocks).replace("\\\n", " ")
    lines = [*block.splitlines(), *re.findall(r"`([^`]+)`", BLOCKS.sub("", text))]
    plain = (re.sub(r"\s+", " ", re.sub(r"\s+# .*", "", line)).strip() for line in lines)
    return {line for line in plain if " " in line and TYPED.match(line)}


def runs_of(program: str) -> list[tuple[str, ...]]:
    """The words behind each call of a program, up to the next program of the line.

    What names flags alone is a word about them, and nothing that is typed.
    """
    found = {
        words
        for document in DOCUMENTS
        for line in told(document)
        for words in _calls(program, line)
        if any(not word.startswith("-") for word in words)
    }
    return sorted(found)


def _calls(program: str, line: str) -> Iterator[tuple[str, ...]]:
    for part in re.split(r"\s(?:\||&&)\s", line):
        words = shlex.split(part)
        if program in words:
            behind = words[words.index(program) + 1 :]
            yield tuple(behind[: behind.index("--")] if "--" in behind else behind)
