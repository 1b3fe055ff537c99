"""Profiles: settings for the nodes that names, a label selector or GPU models select."""

import enum
import fnmatch
from collections.abc import Mapping
from typing import Final

import msgspec

from agent.codec.faults import Faults
from agent.codec.known_keys import KnownKey
from agent.core.cluster.selector import Selector
from agent.core.inventory.gpu import Scan
from agent.settings.fields import Setting

WILD: Final = frozenset("*?[")
"""A name with one of these characters is a pattern."""


class NodeFacts(msgspec.Struct, frozen=True):
    """The facts that settings may depend on. `labels` and `gpus` None: not known yet.

    `gpus`: the model of each GPU by its UUID, as the driver names it. `former`: the same of GPUs
    that are gone and not replaced.
    """

    name: str = ""
    labels: Mapping[str, str] | None = None
    gpus: Mapping[str, str] | None = None
    former: Mapping[str, str] = msgspec.field(default_factory=dict)

    def after(self, scan: Scan) -> "NodeFacts":
        """The facts after a scan. Models of GPUs that are gone count until other GPUs come.

        So the settings stay the same while a driver is unloaded and loaded again.
        """
        known = {**self.former, **(self.gpus or {})}
        silent = {fault.gpu for fault in scan.faults}
        gpus = {uuid: model for uuid, model in known.items() if uuid in silent}
        gpus |= {gpu.uuid: gpu.name for gpu in scan.gpus}
        gone = {uuid: model for uuid, model in known.items() if uuid not in gpus}
        return msgspec.structs.replace(
            self, gpus=gpus, former=gone if gpus.keys() <= known.keys() else {}
        )


Tier = enum.IntEnum("Tier", "OWN NAME LABELS ANY", start=0)
"""The tiers of HAMi's config.json: of its entries only those in the first tier that matches apply.

OWN: profiles of our own file, which apply beside them. Source: HAMi #3173.
"""


class ProfileMatch(msgspec.Struct, frozen=True):
    """A profile's condition. All parts that are set must hold; one of several names suffices.

    Names may contain `*` and `?`, but those of HAMi's entries are literal. A model is a part of a
    GPU's name, in any case, as in the annotation `nvidia.com/use-gputype`.
    """

    nodes: tuple[str, ...] = ()
    labels: Selector | None = None
    gpus: tuple[str, ...] = ()
    tier: Tier = Tier.OWN

    def holds(self, facts: NodeFacts) -> bool:
        """True if a node with these facts matches. Labels or GPUs not known yet do not match."""
        if not self.names(facts.name):
            return False
        by_label = self.labels is None or (
            facts.labels is not None and self.labels.matches(facts.labels)
        )
        models = [one.lower() for one in (*(facts.gpus or {}).values(), *facts.former.values())]
        by_gpu = not self.gpus or any(one.lower() in model for one in self.gpus for model in models)
        return by_label and by_gpu

    def names(self, name: str) -> bool:
        """True if the name matches; labels and GPUs do not count here."""
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
