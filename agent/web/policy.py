"""Settings of the web pages. Without aiohttp: verbs that only read settings do not load it."""

import enum


class ReaderPolicy(enum.StrEnum):
    """Whose requests for what names pods are answered over TCP."""

    LOCAL = "local"
    ALL = "all"


class HamiNames(enum.StrEnum):
    """By which names the metrics also have the series of HAMi's vGPUmonitor."""

    NONE = "none"
    CURRENT = "current"
    """Of HAMi 2.9 and later."""
    LEGACY = "legacy"
    """Of HAMi up to and including 2.8, which later ones serve with `--legacy-metrics`."""
    BOTH = "both"
