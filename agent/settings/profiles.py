"""Profiles: settings for the nodes that names, a label selector or GPU models select."""

import fnmatch
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

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


class ProfileMatch(msgspec.Struct, frozen=True):
    """A profile's condition. All parts that are set must hold; one of several names suffices.

    Names may contain `*` and `?`. With `exact` they are literal, and no names match no node. A
    model is a part of a GPU's name, in any case, as in the annotation `nvidia.com/use-gputype`.
    """

    nodes: tuple[str, ...] = ()
    labels: Selector | None = None
    gpus: tuple[str, ...] = ()
    exact: bool = False

    def holds(self, facts: NodeFacts) -> bool:
        """True if a node with these facts matches. Labels or GPUs not known yet do not match."""
        by_label = self.labels is None or (
            facts.labels is not None and self.labels.matches(facts.labels)
        )
        by_name = self.names(facts.name)
        models = [one.lower() for one in (*(facts.gpus or {}).values(), *facts.former.values())]
        by_gpu = not self.gpus or any(one.lower() in model for one in self.gpus for model in models)
        return by_name and by_label and by_gpu

    def names(self, name: str) -> bool:
        """True if the name matches; labels and GPUs do not count here."""
        if self.exact:
            return name in self.nodes
        return not self.nodes or any(fnmatch.fnmatchcase(name, one) for one in self.nodes)

    @property
    def singles(self) -> tuple[str, ...]:
        """The names that are not patterns."""
        return tuple(name for name in self.nodes if self.exact or not WILD & {*name})

    @property
    def by_name_alone(self) -> bool:
        """True if the condition asks for neither labels nor GPUs."""
        return self.labels is None and not self.gpus


class SettingsProfile(msgspec.Struct, frozen=True):
    """Settings for the nodes that `match` selects. `where`: its place, `file:line:column`.

    An entry of HAMi's config.json becomes a profile with an exact match and no name. `empty`: its
    zeros and falses, which override nothing.
    """

    name: str
    match: ProfileMatch
    settings: tuple[Setting, ...]
    where: str
    empty: tuple[KnownKey, ...] = ()


class Profiles:
    """All profiles, indexed by node name, so that a node does not try thousands of them."""

    def __init__(self, profiles: Iterable[SettingsProfile]) -> None:
        self._all = tuple(profiles)
        self._named: dict[str, list[int]] = defaultdict(list)
        self._others: list[int] = []
        for number, profile in enumerate(self._all):
            match = profile.match
            if not match.exact and (not match.nodes or match.singles != match.nodes):
                self._others.append(number)
            else:
                for name in match.singles:
                    self._named[name].append(number)

    def __iter__(self) -> Iterator[SettingsProfile]:
        return iter(self._all)

    def of(self, facts: NodeFacts) -> list[SettingsProfile]:
        """The profiles that apply to a node with these facts, in their order."""
        return [one for one in self.naming(facts.name) if one.match.holds(facts)]

    def naming(self, name: str) -> list[SettingsProfile]:
        """The profiles that match the name; labels and GPUs do not count here."""
        numbers = sorted({*self._others, *self._named.get(name, ())})
        return [one for one in (self._all[number] for number in numbers) if one.match.names(name)]
