"""The setting `web.readers`. Without aiohttp, because the settings are read before it is loaded."""

import enum


class ReaderPolicy(enum.StrEnum):
    """Whose requests for what names pods are answered over TCP."""

    LOCAL = "local"
    ALL = "all"
