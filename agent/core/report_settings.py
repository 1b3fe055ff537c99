"""How the inventory is told to the scheduler."""

import dataclasses
import enum


class ReportProfile(enum.StrEnum):
    """The form of the register annotation, which the scheduler's version decides."""

    JSON = "json"
    """HAMi 2.8 and later."""
    COLON = "colon"
    """HAMi 2.5 to 2.7.1; with a stamp in the handshake every 30 s."""
    COLON_7 = "colon-7"
    """HAMi 2.4, which reads records of seven fields alone."""

    @property
    def stamps(self) -> bool:
        """True where a scheduler drops a node that does not write the handshake for a minute."""
        return self is not ReportProfile.JSON


@dataclasses.dataclass(frozen=True, slots=True)
class ReportSettings:
    """`topology_score`: write the score annotation, too; without it there shall be none."""

    profile: ReportProfile = ReportProfile.JSON
    topology_score: bool = False
