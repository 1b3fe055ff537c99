"""HAMi's releases: which one a scheduler is, and what tests cannot see beside an old one."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_WORD: Final = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_OLDEST: Final = (2, 5, 0)
_DEADLINE: Final = 20.0


@dataclass(frozen=True, slots=True, order=True)
class Release:
    """One release of HAMi's scheduler."""

    number: tuple[int, int, int]

    @property
    def is_old(self) -> bool:
        """True before 2.8: it reads records of fields, and only after a sign of life."""
        return self.number < (2, 8, 0)

    @property
    def flags(self) -> tuple[str, ...]:
        """What an agent must be told so that this scheduler reads its report."""
        return ("--report-profile", "colon") if self.is_old else ()

    @property
    def serves_inits(self) -> bool:
        """True where it gives init containers GPUs of their own.

        Source: HAMi v2.9 pkg/device/devices.go, Resourcereqs.
        """
        return self.number >= (2, 9, 0)

    def __str__(self) -> str:
        return ".".join(map(str, self.number))


MODEL: Final = Release((2, 10, 0))
"""The one whose rules our model of the scheduler has."""


def release_of(scheduler: Path, named: str | None) -> Release:
    """The release of a scheduler: what it says itself, else what the user says of it.

    Raises ValueError: nobody knows, or no agent can serve it; in a sentence.
    """
    said = subprocess.run(  # noqa: S603 -- whoever runs the tests has named it
        (scheduler, "version"),
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_DEADLINE,
    ).stdout
    own = next(filter(None, (_read(word) for word in said.partition("\n")[0].split()[-1:])), None)
    told = _read(named) if named else None
    found = own or told
    if named and told is None:
        raise ValueError(f"HAMI_PEERS_SCHEDULER_RELEASE is {named!r}: write it as 2.7.1")
    if own and told and own != told:
        raise ValueError(f"HAMI_PEERS_SCHEDULER says that it is {own}, and you say {told}")
    if found is None:
        raise ValueError(
            "HAMI_PEERS_SCHEDULER does not say which release it is:"
            " name it in HAMI_PEERS_SCHEDULER_RELEASE, as in 2.7.1"
        )
    if found.number < _OLDEST:
        raise ValueError(f"HAMI_PEERS_SCHEDULER is {found}: the oldest that is tried is 2.5.0")
    return found


def _read(word: str) -> Release | None:
    """None also for what a scheduler says of itself that was built without being told."""
    match = _WORD.fullmatch(word)
    number = (int(match[1]), int(match[2]), int(match[3])) if match else (0, 0, 0)
    return Release(number) if any(number) else None


BEFORE_2_8: Final[Mapping[str, str]] = {
    "test_pods.py::test_a_pod_whose_init_container_alone_has_a_gpu_can_be_served": (
        "it counts no GPUs of init containers and writes none for them"
    )
}
"""By test, file and name, why it cannot hold beside a scheduler before 2.8."""
BEFORE_2_10: Final[Mapping[str, str]] = {
    "test_explain.py::test_a_cordon_reaches_the_scheduler_and_is_told_beside_a_bad_gpu": (
        "it knows no cordon of a GPU"
    )
}
"""The same before 2.10."""


def impossible(release: Release, test: str) -> str | None:
    """Why a test (file::name, without its parameters) cannot hold beside it; None: it can."""
    if release.number < (2, 10, 0) and test in BEFORE_2_10:
        return BEFORE_2_10[test]
    return BEFORE_2_8.get(test) if release.is_old else None
