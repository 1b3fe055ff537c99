"""Turns the error messages of the YAML and JSON parsers into ones that say what to correct."""

from typing import Final

import yaml

UNCLOSED: Final = "found unexpected end of stream"

_YAML: Final = {
    "but found another document": (
        "a second document begins here; a settings file has one: remove the `---`, or make two "
        "files; from the output of helm or kubectl, give only the file in the ConfigMap"
    ),
    "did not find expected key": (
        "this line does not fit the ones above: its indentation is wrong, or a `:` is missing"
    ),
    "did not find expected '-' indicator": (
        "this line does not fit the list above: its indentation is wrong, or a `-` is missing"
    ),
    "did not find expected ',' or '}'": "a `,` or the closing `}` is missing",
    "did not find expected ',' or ']'": "a `,` or the closing `]` is missing",
    "did not find expected node content": "a value is missing here",
    "could not find expected ':'": "a `:` and a space are missing after the key",
    UNCLOSED: "a quote was opened and is not closed",
    "mapping values are not allowed in this context": (
        "a `:` where no key can be: its indentation is wrong, or the text needs quotes"
    ),
    "found unhashable key": (
        "one value is expected here, not braces; is it a template that was not rendered?"
    ),
}
TEMPLATE: Final = (
    "this is a template that was not rendered; give the output of `helm template`, or the file in "
    "the cluster's ConfigMap"
)
_TAB: Final = "this is a tab; YAML is indented with spaces"

_JSON: Final = {
    "Expecting property name enclosed in double quotes": (
        "a key in double quotes is expected; JSON has no comma after the last entry, no comments "
        "and no single quotes"
    ),
    "Illegal trailing comma before end of object": "JSON has no comma after the last entry",
    "Illegal trailing comma before end of array": "JSON has no comma after the last entry",
    "Expecting value": "a value is expected",
    "Expecting ',' delimiter": "a `,` or a closing bracket is expected",
    "Expecting ':' delimiter": "a `:` is expected after the key",
    "Extra data": "the JSON value ended before; a file has only one",
    "Invalid control character": (
        "a text contains a control character; write a tab as \\t, a newline as \\n"
    ),
    "Unterminated string": "a quote was opened and is not closed",
    "Invalid \\escape": "an unknown escape; a backslash itself is written as \\\\",
    "Invalid \\uXXXX escape": "an unknown escape; four hexadecimal digits follow \\u",
    "Unexpected UTF-8 BOM (decode using utf-8-sig)": (
        "the file begins with a byte order mark; save it as UTF-8 without one"
    ),
}


def of_yaml(problem: str, found: str) -> str:
    """Describe a problem of libyaml; `found` is the character at its place."""
    if found == "\t":
        return _TAB
    if problem == "found character that cannot start any token":
        return f"a value cannot begin with `{found}`; put it in quotes"
    return _YAML.get(problem, problem)


def of_json(problem: str) -> str:
    """Describe a problem of Python's JSON decoder."""
    words = problem.removesuffix(" at").removesuffix(" starting").partition(": ")[0]
    return _JSON.get(words, words)


def unprintable(text: str) -> tuple[int, str] | None:
    """The offset of the first character that YAML forbids, and a message; None: there is none."""
    match = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if match is None:
        return None
    return match.start(), f"the character U+{ord(match[0]):04X} is not allowed; remove it"
