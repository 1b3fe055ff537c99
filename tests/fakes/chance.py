"""Chance that a test can predict."""

import random


class Seeded(random.Random):
    """The same numbers at every run."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)


class NoChance(random.Random):
    """Always zero: jitter adds nothing."""

    def random(self) -> float:
        """Zero."""
        return 0.0
