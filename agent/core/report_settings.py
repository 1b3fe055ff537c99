"""Settings of the report to the scheduler."""

import enum

import msgspec


class ReportProfile(enum.StrEnum):
    """The form of the register annotation. It depends on the scheduler's version."""

    JSON = "json"
    """HAMi 2.8 and later."""
    COLON = "colon"
    """HAMi 2.5 up to and including 2.7.1, with a stamp in the handshake every 30 s."""

    @property
    def stamps(self) -> bool:
        """True if the scheduler drops a node whose handshake is older than 60 s."""
        return self is not ReportProfile.JSON


class ReportSettings(msgspec.Struct, frozen=True):
    """`topology_score`: write the score annotation; otherwise the reporter removes it."""

    profile: ReportProfile = ReportProfile.JSON
    topology_score: bool = False
