"""ResourceQuotas: limits on GPU memory and cores of the pods of a namespace.

Source: HAMi v2.10 pkg/device/quota.go. Kubernetes counts the requests of pods; HAMi counts, by the
same objects, what it gave them.
"""

from typing import Final

from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.requests import CORES, MEMORY, parse_quantity
from agent.sandbox.scheduler.usage import Usage

_PREFIX: Final = "limits."
_KEYS: Final = {_PREFIX + MEMORY: MEMORY, _PREFIX + CORES: CORES}


class Quotas:
    """The limits of all namespaces. If several quotas limit one resource, the last seen counts.

    `memory_factor` multiplies limits on memory, like requests.
    """

    def __init__(self, usage: Usage, memory_factor: int) -> None:
        self._usage = usage
        self._factor = max(memory_factor, 1)
        self._limits: dict[tuple[str, str], int] = {}
        self._seen: dict[str, Json] = {}

    def see(self, kind: str, quota: Json) -> None:
        """Take in a ResourceQuota that was ADDED, MODIFIED or DELETED.

        Its former limits end, even if another quota has the same limit.
        """
        namespace, key = quota["metadata"]["namespace"], full_name(quota)
        for resource in _hard(self._seen.pop(key, {})):
            self._limits.pop((namespace, resource), None)
        if kind != "DELETED":
            self._seen[key] = quota
            for resource, limit in _hard(quota).items():
                self._limits[namespace, resource] = limit

    def retain(self, names: frozenset[str]) -> None:
        """Forget all quotas except these: the others were deleted while no watch was open."""
        for key in self._seen.keys() - names:
            self.see("DELETED", self._seen[key])

    def fits(self, namespace: str, memory_mib: int, core_percent: int) -> bool:
        """Whether the namespace may hold this much more. A limit of 0 blocks all."""
        memory = self._limits.get((namespace, MEMORY))
        cores = self._limits.get((namespace, CORES))
        if memory is None and cores is None:
            return True
        held = self._usage.held(namespace)
        if memory is not None and held.memory_mib + memory_mib > memory * self._factor:
            return False
        return cores is None or held.core_percent + core_percent <= cores


def full_name(quota: Json) -> str:
    """Namespace and name of a quota."""
    return f"{quota['metadata']['namespace']}/{quota['metadata']['name']}"


def _hard(quota: Json) -> dict[str, int]:
    """HAMi's limits in the quota. A value that is not a whole number is ignored."""
    hard = (quota.get("spec") or {}).get("hard") or {}
    found = {_KEYS[key]: parse_quantity(value) for key, value in hard.items() if key in _KEYS}
    return {resource: limit for resource, limit in found.items() if limit is not None}
