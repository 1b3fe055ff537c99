"""The sources of settings (files, environment, flags), and what is read from each.

Order, later wins: defaults, HAMi's device-config.yaml, our own file, its profiles in their order,
HAMi's config.json for this node, the environment, flags.
"""

import contextlib
import enum
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent.core.cluster.selector import Selector
from agent.core.errors import SettingsError
from agent.core.state.last_good import SourceFile
from agent.settings.fields import Setting

WILD: Final = frozenset("*?[")
"""A name with one of these characters is a pattern."""
TOLD: Final = 20
"""Warnings of one kind about one file; further ones are only counted."""
NODE_CAPACITY: Final = "the kubelet would then reject pods that fit, by a sum of its own"
"""Why `reportNodeCapacity`, in all its spellings, has no effect."""


class Sources(msgspec.Struct, frozen=True):
    """The sources of settings. A file that does not exist, or was not read yet, is None.

    `file`: the path of our own file; None: the default file, if it exists. `flags`: the given
    options by name. `host`: the host's name.
    """

    file: Path | None = None
    environ: Mapping[str, str] = msgspec.field(default_factory=dict)
    flags: Mapping[str, str] = msgspec.field(default_factory=dict)
    host: str = ""
    device_config: SourceFile | None = None
    own: SourceFile | None = None
    node_config: SourceFile | None = None


class Faults:
    """The errors of one reading in their order, each once, so that one message names them all."""

    def __init__(self) -> None:
        self._errors: dict[str, SettingsError] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep a SettingsError that the block raises, and continue after it."""
        try:
            yield
        except SettingsError as error:
            for text in error.every:
                self._errors.setdefault(text, error)

    @property
    def texts(self) -> tuple[str, ...]:
        """What each error says."""
        return tuple(self._errors)

    def refuse(self) -> None:
        """Raise one SettingsError with all errors, if there are any."""
        if not self._errors:
            return
        first, *more = self._errors
        if not more:
            raise self._errors[first]
        raise SettingsError(f"{first} (and {len(more)} more)", every=tuple(self._errors))


def first_of(warnings: Sequence[str], name: str) -> tuple[str, ...]:
    """The first TOLD of the warnings about `name`, and one with the number of the others."""
    more = len(warnings) - TOLD
    count = (f"{name}: and {more} more are passed over",) if more > 0 else ()
    return (*warnings[:TOLD], *count)


class KnownKey(msgspec.Struct, frozen=True):
    """A known key in a file of HAMi's, its value and its place (`file:line:column`)."""

    key: str
    value: object
    where: str


class NodeFacts(msgspec.Struct, frozen=True):
    """The facts that settings may depend on. `labels` and `gpus` None: not known yet."""

    name: str = ""
    labels: Mapping[str, str] | None = None
    gpus: frozenset[str] | None = None


Tier = enum.IntEnum("Tier", "OWN NAME LABELS ANY", start=0)
"""The tiers of HAMi's config.json: of its entries only those in the first tier that matches apply.

OWN: profiles of our own file, which apply beside them. Source: HAMi #3173.
"""


class ProfileMatch(msgspec.Struct, frozen=True):
    """A profile's condition. All parts that are set must hold; one of several names suffices.

    Names may contain `*` and `?`, but those of HAMi's entries are literal.
    """

    nodes: tuple[str, ...] = ()
    labels: Selector | None = None
    tier: Tier = Tier.OWN

    def holds(self, facts: NodeFacts) -> bool:
        """True if a node with these facts matches. Labels that are not known yet do not match."""
        by_label = self.labels is None or (
            facts.labels is not None and self.labels.matches(facts.labels)
        )
        return by_label and self.names(facts.name)

    def names(self, name: str) -> bool:
        """True if the name matches; labels do not count here."""
        if self.tier is Tier.NAME:
            return name in self.nodes
        return not self.nodes or any(fnmatch.fnmatchcase(name, one) for one in self.nodes)

    @property
    def singles(self) -> tuple[str, ...]:
        """The names that are not patterns."""
        return tuple(name for name in self.nodes if self.tier or not WILD & {*name})


class SettingsProfile(msgspec.Struct, frozen=True):
    """Settings for the nodes that `match` selects. `where`: its place, `file:line:column`.

    An entry of HAMi's config.json becomes a profile without a name for each tier that it is in.
    `empty`: its zeros and falses, which override nothing. `faults`: its values that do not fit;
    they refuse the settings of the nodes to which it applies.
    """

    name: str
    match: ProfileMatch
    settings: tuple[Setting, ...]
    where: str
    empty: tuple[KnownKey, ...] = ()
    faults: Faults = msgspec.field(default_factory=Faults)


class Layer(msgspec.Struct, frozen=True):
    """What one source sets for all nodes and for some, and warnings about what it ignores."""

    settings: tuple[Setting, ...] = ()
    profiles: tuple[SettingsProfile, ...] = ()
    warnings: tuple[str, ...] = ()
