"""Keeps the newest rows of numbers in memory of a fixed size."""

import array
from collections.abc import Iterator


class Ring:
    """At most `size` rows of `width` numbers (8 bytes each, allocated at once). A gap is NaN."""

    def __init__(self, size: int, width: int) -> None:
        self._size = size
        self._width = width
        self._cells = array.array("d", bytes(8 * size * width))
        self._written = 0

    def __len__(self) -> int:
        return min(self._written, self._size)

    @property
    def bytes(self) -> int:
        """The memory of all rows, empty ones included."""
        return len(self._cells) * self._cells.itemsize

    def add(self, *row: float) -> None:
        """Add the newest row; a full ring drops its oldest."""
        if len(row) != self._width:
            raise ValueError(f"a row has {self._width} numbers, not {len(row)}")
        start = self._written % self._size * self._width
        self._cells[start : start + self._width] = array.array("d", row)
        self._written += 1

    def rows(self) -> Iterator[tuple[float, ...]]:
        """Yield the rows, the oldest first."""
        for number in range(self._written - len(self), self._written):
            start = number % self._size * self._width
            yield tuple(self._cells[start : start + self._width])
