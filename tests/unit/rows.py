"""Tables that are text: one row a line, as `given => expected`."""

from pathlib import Path


def rows_of(module: str, name: str) -> list[tuple[str, str]]:
    """The rows of the file of that name beside the module; `#` begins a comment."""
    lines = Path(module).with_name(name).read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=>") for line in lines if not line.startswith("#"))
    return [(before.strip(), after.strip()) for before, arrow, after in pairs if arrow]
