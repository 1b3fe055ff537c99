"""What was measured, beside what was promised: a table for people, and the same for programs."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

FAR: Final = 5.0
"""A figure so many times beyond its bound is wrong on any machine."""
FAR_STARTING: Final = 15.0
"""The same where the start of a Python process is in the figure, which a busy machine drags out."""
_HEAD: Final = "| what | measured | bound | |\n|---|---|---|---|\n"


class Table:
    """Figures in the order in which they were measured; of one that comes again, the worse."""

    def __init__(self) -> None:
        self._figures: dict[str, Mapping[str, Any]] = {}

    def add(self, what: str, measured: float, bound: float | None = None, unit: str = "s") -> None:
        """One more figure; without a bound nothing is promised."""
        self.take([{"what": what, "measured": measured, "bound": bound, "unit": unit}])

    def hold(
        self, what: str, measured: float, bound: float, unit: str = "s", *, far: float = FAR
    ) -> None:
        """One more figure, which was promised. One without a unit is a count."""
        self.add(what, measured, bound, unit)
        most = far * bound if unit else bound
        assert measured <= most, f"{what}: {measured:g}, not {most:g} {unit}"

    def told(self) -> list[Mapping[str, Any]]:
        return [*self._figures.values()]

    def take(self, told: Iterable[Mapping[str, Any]]) -> None:
        """Add figures, such as those of another process."""
        for one in told:
            known = self._figures.get(one["what"])
            if known is None or known["measured"] < one["measured"]:
                self._figures[one["what"]] = one

    def text(self) -> str:
        return _HEAD + "".join(map(_line, self.told()))

    def write(self, path: Path) -> None:
        """Write it to a file, and as JSON beside that. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text())
        text = json.dumps(self.told(), indent=2, ensure_ascii=False)
        path.with_suffix(".json").write_text(text + "\n")


def _line(one: Mapping[str, Any]) -> str:
    measured, bound, unit = round(one["measured"], 3), one["bound"], one["unit"]
    verdict = "" if bound is None else "over" if measured > bound else "ok"
    promised = "-" if bound is None else f"{bound:g} {unit}"
    return f"| {one['what']} | {measured:g} {unit} | {promised} | {verdict} |\n"
