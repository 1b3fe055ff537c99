"""Parses command lines; a mistake gets one sentence that names the verb."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn

from typing_extensions import override

from agent.errors import cap

TABLE: Final = "table"
FORMS: Final = (TABLE, "json", "yaml")
_FORM_WORDS: Final = {
    TABLE: "for people",
    "wide": "with all columns",
    "json": "everything, for programs",
    "yaml": "the same as YAML",
    "name": "names alone",
}


LIKENESS: Final = 0.65
"""The least likeness of a name in a hint (1: equal). Less misleads."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name, in any case; empty if no known one is similar."""
    import difflib  # noqa: PLC0415 -- only a mistake needs it

    names = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=LIKENESS)
    return f"; did you mean {names[close[0]]}?" if close else ""


class _WholeWords(argparse.HelpFormatter):
    """argparse's form of help, without breaks inside a path or an option that has hyphens."""

    @override
    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap  # noqa: PLC0415 -- `run` shows no help and must start fast

        words = " ".join(text.split())
        return textwrap.wrap(words, width, break_on_hyphens=False, break_long_words=False)

    @override
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = self._split_lines(text, width - len(indent))
        return "\n".join(f"{indent}{line}" for line in lines)


class Parser(argparse.ArgumentParser):
    """argparse's parser without the usage before each error: `run` has sixty options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 -- argparse types them
        super().__init__(*args, **{"formatter_class": _WholeWords, **kwargs})

    @override
    def parse_known_args(  # type: ignore[override]  # it has overloads for its namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse, but let the verb itself refuse unknown arguments."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(self._left_over(rest))
        return parsed, rest

    @override
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check as argparse, and add the nearest choice to the error."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += nearest(str(value), map(str, action.choices or ()))
            raise

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")

    def _left_over(self, words: Sequence[str]) -> str:
        """Describe unknown arguments, with the nearest option for the first one."""
        option = words[0].partition("=")[0]
        if not option.startswith("-"):
            return f"unexpected argument {cap(' '.join(words))}"
        names = [name for name in self._option_string_actions if name.startswith("--")]
        return f"unknown option {cap(option)}{nearest(option, names)}"


def add_output(
    parser: argparse.ArgumentParser,
    default: str = TABLE,
    forms: Sequence[str] = FORMS,
) -> None:
    """Add `-o table|json|yaml` and `--json`. `forms`: those of the verb."""
    words = "; ".join(f"{form}: {_FORM_WORDS[form]}" for form in forms)
    parser.add_argument("-o", "--output", choices=forms, default=default, help=words)
    parser.add_argument(
        "--json",
        dest="output",
        action="store_const",
        const="json",
        default=default,
        help="the same as -o json",
    )
