"""Golden texts: what tests/golden has of what is made now. `make golden` writes them anew."""

import os
import re
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).with_name("golden")
IS_WRITTEN: Final = "HAMI_GOLDEN" in os.environ  # noqa: TID251 -- said by `make golden`


def golden(name: str, made: str) -> str:
    """The text of the file."""
    if IS_WRITTEN:
        (FOLDER / name).write_text(made, "utf-8")
    return (FOLDER / name).read_text("utf-8")


def parts(name: str, mark: str = "=== ") -> dict[str, str]:
    """What follows each line of the file that begins with the mark, by the rest of that line."""
    text = (FOLDER / name).read_text("utf-8")
    _, *found = re.split(f"^{re.escape(mark)}(.*)\n", text, flags=re.MULTILINE)
    return dict(zip(found[::2], found[1::2], strict=True))


def golden_part(name: str, part: str, made: str, mark: str = "=== ") -> str:
    """The text of that part of the file."""
    if IS_WRITTEN:
        told = parts(name, mark) | {part: made}
        golden(name, "".join(f"{mark}{one}\n{text}" for one, text in told.items()))
    return parts(name, mark)[part]
