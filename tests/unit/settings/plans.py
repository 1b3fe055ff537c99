"""What the sources say, without files."""

from collections.abc import Mapping
from typing import Any

from agent.ledger import SourceFile
from agent.settings.reading import NodeValues, Sources, make_plan


def plan_of(
    devices: str = "",
    own: str = "",
    nodes: str = "",
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> NodeValues:
    """The plan of these contents of HAMi's YAML, our own file and HAMi's JSON."""

    def text(name: str, content: str) -> SourceFile | None:
        return SourceFile(name, content.encode(errors="replace")) if content else None

    sources = Sources(
        environ=environ or {},
        flags=flags or {},
        device_config=text("d.yaml", devices),
        own=text("c.yaml", own),
        node_config=text("n.json", nodes),
    )
    return make_plan(sources)


def sources_of(words: str) -> dict[str, Any]:
    """The sources that a row names, for plan_of()."""
    found: dict[str, Any] = {}
    for part in words.split(" & "):
        kind, _, text = part.partition(" ")
        if kind in {"environ", "flags"}:
            name, _, value = text.partition("=")
            found.setdefault(kind, {})[name] = value
        elif kind != "nothing":
            found[kind.rstrip("!")] = text.replace("\\n", "\n")
    return found
