"""The device table of one resource and the choice of ids for a container.

The rules and error texts are those of kubelet 1.36, without topology hints (policy none). So every
free id counts as one "without affinity".
"""

import random
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from agent.sandbox.kubelet.pods import ContainerKey

HEALTHY: Final = "Healthy"
NO_NUMA: Final = -1
_QUALIFIED_PREFIX_LIMIT: Final = 253
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


class DeviceError(Exception):
    """No ids were given. str() is the kubelet's exact text.

    `said` is the text in a container's status: for an error that a plugin returned, only the
    plugin's text.
    """

    def __init__(self, text: str, said: str | None = None) -> None:
        super().__init__(text)
        self.said: Final = text if said is None else said


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """One entry of a list. `nodes` is None if the entry had no topology."""

    id: str
    health: str
    nodes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """All ids of one resource. An id that was listed twice can be in both sets."""

    nodes: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    healthy: frozenset[str] = frozenset()
    unhealthy: frozenset[str] = frozenset()

    @classmethod
    def of(cls, listed: Iterable[ListedDevice]) -> "DeviceTable":
        """The table after a list, which replaces everything before it."""
        entries = tuple(listed)
        return cls(
            nodes={entry.id: entry.nodes for entry in entries},
            healthy=frozenset(entry.id for entry in entries if entry.health == HEALTHY),
            unhealthy=frozenset(entry.id for entry in entries if entry.health != HEALTHY),
        )

    def without_plugin(self) -> "DeviceTable":
        """The table after the plugin's stream has ended: all ids are unhealthy."""
        return replace(self, healthy=frozenset(), unhealthy=self.unhealthy | self.healthy)

    @property
    def capacity(self) -> int:
        """Healthy and unhealthy ids together; an id in both sets counts twice."""
        return len(self.healthy) + len(self.unhealthy)

    def by_numa(self, ids: Iterable[str]) -> dict[int, tuple[str, ...]]:
        """Ids under each of their NUMA nodes, as the checkpoint has them; -1 means none."""
        grouped: dict[int, list[str]] = {}
        for device_id in ids:
            for node in self.nodes.get(device_id) or (NO_NUMA,):
                grouped.setdefault(node, []).append(device_id)
        return {node: tuple(members) for node, members in grouped.items()}


def is_extended_resource(name: str) -> bool:
    """Whether a plugin may register this resource name."""
    domain, slash, tail = name.partition("/")
    if not slash or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    prefix_fits = len("requests." + domain) <= _QUALIFIED_PREFIX_LIMIT
    return bool(prefix_fits and _SUBDOMAIN.fullmatch(domain) and _NAME.fullmatch(tail))


@dataclass(frozen=True, slots=True)
class Demand:
    """The request of one container for one resource, and its recorded ids."""

    owner: ContainerKey
    resource: str
    count: int
    recorded: frozenset[str] | None = None

    def still_needed(self) -> int:
        """How many ids are missing.

        Raises:
            DeviceError: the container's record holds another count.
        """
        if self.recorded is None:
            return self.count
        if len(self.recorded) != self.count:
            uid, container = self.owner
            raise DeviceError(
                f'pod "{uid}" container "{container}" changed request for resource '
                f'"{self.resource}" from {len(self.recorded)} to {self.count}'
            )
        return 0

    def require_health(self, table: DeviceTable | None) -> DeviceTable:
        """Return the table if the resource can be allocated, even for a count of 0.

        Raises:
            DeviceError: unregistered, no healthy id, or a recorded id is unhealthy.
        """
        if table is None:
            raise DeviceError(f"cannot allocate unregistered device {self.resource}")
        blocked = f"cannot allocate unhealthy devices {self.resource}"
        if not table.healthy:
            raise DeviceError(f"no healthy devices present; {blocked}")
        if self.recorded is not None and not self.recorded <= table.healthy:
            raise DeviceError(f"previously allocated devices are no longer healthy; {blocked}")
        return table

    def available(
        self, table: DeviceTable, in_use: Collection[str], missing: int
    ) -> frozenset[str]:
        """The ids that can be allocated now.

        Raises:
            DeviceError: they are fewer than needed.
        """
        free = table.healthy.difference(in_use)
        if len(free) < missing:
            raise DeviceError(
                f"requested number of devices unavailable for {self.resource}. "
                f"Requested: {missing}, Available: {len(free)}"
            )
        return free


def draw(chance: random.Random, ids: Iterable[str], count: int) -> frozenset[str]:
    """At most `count` ids in random order, as from the kubelet's maps."""
    pool = sorted(ids)
    return frozenset(chance.sample(pool, min(count, len(pool))))


def fill(
    chance: random.Random, preferred: Iterable[str], free: frozenset[str], count: int
) -> frozenset[str]:
    """`count` free ids, the plugin's preferred ones first. Ids that are not free are ignored."""
    chosen = draw(chance, free.intersection(preferred), count)
    return chosen | draw(chance, free - chosen, count - len(chosen))


def shuffled(chance: random.Random, values: Iterable[str]) -> list[str]:
    """The values in random order, because no plugin may rely on an order."""
    order = sorted(values)
    chance.shuffle(order)
    return order
