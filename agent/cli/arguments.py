"""How a command line is read: one sentence for a mistake, of the verb in which it was made."""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from typing_extensions import override

from agent.core.errors import cap


class Parser(argparse.ArgumentParser):
    """argparse's, without the usage before each error: `run` has sixty options."""

    @override
    def parse_known_args(  # type: ignore[override]  # it has overloads for its namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As there, but a word that is left over is refused by the verb that it was given to."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(self._left_over(rest))
        return found, rest

    @override
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As there, with the nearest word behind the refusal."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += nearest(str(value), map(str, action.choices or ()))
            raise

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")

    def _left_over(self, words: Sequence[str]) -> str:
        """The words that mean nothing here, and what may have been meant by the first."""
        option = words[0].partition("=")[0]
        if not option.startswith("-"):
            return f"unexpected argument {cap(' '.join(words))}"
        names = [name for name in self._option_string_actions if name.startswith("--")]
        return f"unknown option {cap(option)}{nearest(option, names)}"


def add_output(
    parser: argparse.ArgumentParser,
    default: str = "text",
    forms: Sequence[str] = ("text", "json"),
) -> None:
    """`-o text|json`, and `--json` for it. `forms`: those that the verb has."""
    parser.add_argument("-o", "--output", choices=forms, default=default)
    parser.add_argument(
        "--json",
        dest="output",
        action="store_const",
        const="json",
        default=default,
        help="the same as -o json",
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """The hint behind an unknown word, in any case; empty when nothing is alike."""
    words = {one.lower(): one for one in known}
    close = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.65)
    return f"; did you mean {words[close[0]]}?" if close else ""
