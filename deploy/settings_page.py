#!/usr/bin/env python3
"""Writes the reference of all settings into SETTINGS.md, from the table of settings.

    deploy/settings_page.py [PAGE]

PAGE is SETTINGS.md of this repository. What people write before and after the two marks stays; what
is between them is replaced.
"""

import json
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from agent import setting as kinds
from agent.health.judge import xid_classes
from agent.setting import Field
from agent.settings.files import DEVICE_CONFIG, NODE_CONFIG, WITHOUT_EFFECT
from agent.settings.reading import FOREIGN, RESOURCE, SCHEDULER, flag_of
from agent.settings.schema import FIELDS, LIVE

PAGE: Final = Path(__file__).resolve().parents[1] / "SETTINGS.md"
BEGIN: Final = "<!-- make settings -->\n"
END: Final = "<!-- the end of it -->\n"
BETWEEN: Final = re.compile(rf"(?s)(?<={BEGIN}).*(?={END})")
WIDTH: Final = 120

TOP: Final = "Without a section"
"""The heading of settings whose key has no dot."""
NAMED: Final = (
    (kinds.text, "text"),
    (kinds.text_or_whole, "text or whole number"),
    (kinds.optional_text, "text, or empty"),
    (kinds.node_name, "the name of a Node, or empty"),
    (kinds.path, "absolute path"),
    (kinds.optional_path, "absolute path, or empty"),
    (kinds.boolean, "`true` or `false`"),
    (kinds.texts, "list of texts"),
    (kinds.indexes, "list of whole numbers from 0"),
    (kinds.resource_name, "name of an extended resource"),
    (xid_classes, "list of texts of the form `XID=CLASS`"),
)
"""Types that are told by their name; the others are told by their bounds."""
DRAINED: Final = {SCHEDULER: "at the next start", RESOURCE: "at once"}
"""Settings that can change only on a drained node, and when the change takes effect there."""


def main(page: Path) -> None:
    """Write the page anew. Raises ValueError: it has not both marks."""
    page.write_text(with_reference(page.read_text(encoding="utf-8")), encoding="utf-8")


def with_reference(page: str) -> str:
    """The page with the reference of the settings as they are now.

    Raises:
        ValueError: the page does not have both marks once.
    """
    if (page.count(BEGIN), page.count(END)) != (1, 1):
        raise ValueError(f"SETTINGS.md needs {BEGIN!r} and {END!r} once")
    return BETWEEN.sub(lambda _: "\n".join((*reference(), "")), page)


def reference() -> Iterator[str]:
    """The lines: each section with its settings, and what has no effect."""
    sections: dict[str, list[Field]] = {TOP: []}
    for field in FIELDS:
        section, dot, _ = field.key.partition(".")
        sections.setdefault(section if dot else TOP, []).append(field)
    for name, found in sections.items():
        yield from ("", f"## {name if name == TOP else f'Section {name}'}")
        for field in found:
            # How a duration is written stands once, at the top of the page.
            text = field.text.removesuffix(f" {kinds.HOW}")
            yield from ("", f"### {field.key}", "", *wrapped(text), "", *wrapped(facts(field)))
    yield from without_effect()


def facts(field: Field) -> str:
    """What a reader needs of one setting: values, names in all sources, and when it changes."""
    own, *others = (f"`{name}`" for name in field.variables)
    names = [f"{own}{also(others)}"]
    if field.flag:
        names.append(f"`{field.flag}`{also(f'`{flag}`' for flag in field.other_flags)}")
    if field.key in HAMI:
        names.append(f"HAMi: {', '.join(HAMI[field.key])}")
    value = f"{type_of(field)}; default {default(field)}."
    return f"{value[0].upper()}{value[1:]} {'; '.join(names)}.{change(field)}"


def also(names: Iterable[str]) -> str:
    """Other names of the same, behind the first."""
    found = ", ".join(names)
    return f", also {found}" if found else ""


def default(field: Field) -> str:
    """The default as the settings file has it."""
    value = field.read.write(field.default)
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`"
    return f"`{value}`" if value and isinstance(value, str) else f"`{json.dumps(value)}`"


def change(field: Field) -> str:
    """What is special about a change of it; empty: it acts at once, and profiles can set it."""
    if field.key in DRAINED:
        return f" Only on a drained node, {DRAINED[field.key]}."
    if not field.live:
        return " At the next start."
    return "" if field.key in LIVE else " Not in profiles."


def type_of(field: Field) -> str:
    """Type and bounds in words.

    Raises:
        ValueError: there are no words for this type yet.
    """
    for kind, words in NAMED:
        if field.read is kind:
            return words
    return by_bounds(field.read.schema)


def by_bounds(schema: Mapping[str, Any]) -> str:
    """The words of a type that was made with bounds. Raises ValueError: it is of another form."""
    match schema:
        case {"enum": words}:
            told = " or ".join((", ".join(quoted(words[:-1])), *quoted(words[-1:])))
        case {"type": "integer", "minimum": low, "maximum": high}:
            told = f"whole number from {low:,} to {high:,}"
        case {"type": "number", "minimum": low, "maximum": high}:
            told = f"number from {low:g} to {high:g}"
        case {"anyOf": [_, {"type": "number", "minimum": low, "maximum": high}]}:
            told = f"duration from `{kinds.written(low)}` to `{kinds.written(high)}`"
        case {"type": "array", "minItems": 1, "items": {"enum": words}}:
            told = f"list of one or more of {', '.join(quoted(words))}"
        case {"type": "string", "pattern": _}:
            told = "text of the form of the default"
        case _:
            raise ValueError(f"no words for the type {schema}")
    return told


def quoted(words: Iterable[str]) -> list[str]:
    """Each as code."""
    return [f"`{word}`" for word in words]


def hami_keys() -> Mapping[str, list[str]]:
    """The key of each setting in HAMi's two files."""
    keys: defaultdict[str, list[str]] = defaultdict(list)
    for key, setting in DEVICE_CONFIG.items():
        keys[setting].append(f"`{key}` in device-config.yaml")
    for key, setting in NODE_CONFIG.items():
        keys[setting].append(f"`{key}` in config.json")
    return dict(keys)


HAMI: Final = hami_keys()


def without_effect() -> Iterator[str]:
    """The names of HAMi's and NVIDIA's plugins that the agent accepts and does not follow."""
    yield from ("", "## Without effect here", "")
    yield from wrapped(
        "The agent accepts these of HAMi's and NVIDIA's plugins, so that their command lines and "
        "files work, and warns of the variables and flags. Set `sharing.splitCount`, "
        "`sharing.memoryScaling`, `sharing.coreScaling`, `library.disableCoreLimit` and "
        "`log.level` instead."
    )
    yield ""
    named = {"Variables": FOREIGN, "Flags": (*map(flag_of, FOREIGN), "-v", "--v")}
    named |= {f"Keys of {file}": keys for file, keys in WITHOUT_EFFECT.items()}
    for what, names in named.items():
        yield from wrapped(f"{what}: {', '.join(quoted(names))}.", "- ")


def wrapped(text: str, bullet: str = "") -> list[str]:
    """The lines of a paragraph or of an item of a list."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else PAGE)
