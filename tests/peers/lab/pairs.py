"""Pods side by side that no count tells apart: what each was told, or why it was refused."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.errors import RefusalReason
from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.grants import expected_inside, grants, seen_inside
from tests.peers.lab.pods import as_seen, is_up, key, name_of, phase_of

DECIDED_WITHIN: Final = 90.0
"""Seconds until a pod runs or is refused: the scheduler places one pod at a time."""

HANDED_OVER: Final = frozenset({RefusalReason.NO_RIGHT.value, RefusalReason.NO_LOCK.value})
"""Why a pod is refused whose lock was given to another before it was asked for: the other has it,
or was served already and has it no more."""

_ID: Final = re.compile(r"\[(HA-\d+)\]")

Amounts = tuple[int, int]
"""What a pod asks for: MiB, and percent of the cores."""


def reason_in(message: str) -> str:
    """The id of the reason in a refusal's text, or the text where it has none."""
    found = _ID.search(message)
    return found[1] if found else message


@dataclass(eq=False, slots=True)
class Outcome:
    """What became of pods that were created side by side.

    `wrong`: sentences about pods that were told of another share than their own. `refused`: by
    name the ids of reasons, or texts without one; `told`: the whole texts. `served`: how many were
    looked at inside.
    """

    wrong: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)
    served: int = 0

    def rightly(self, robbed: Collection[str]) -> set[str]:
        """Those of the robbed that were refused for their lost lock."""
        return {name for name in robbed if self.refused.get(name) in HANDED_OVER}

    def take(self, other: "Outcome") -> None:
        """Add what became of other pods."""
        self.wrong += other.wrong
        self.refused |= other.refused
        self.told |= other.told
        self.served += other.served

    async def look(self, cluster: Cluster, asked: Mapping[str, Amounts], *made: Object) -> None:
        """Wait until each pod runs or is refused, and hold what it was told against its own.

        `made` are the pods as the API server took them; `asked` is by name. Raises TimeoutError.
        """
        for pod in made:
            name, seen = name_of(pod), await decided(cluster, pod)
            if phase_of(seen) == "Failed":
                message = seen["status"].get("message", "")
                self.refused[name] = reason_in(message)
                self.told[name] = message
                continue
            wanted, told = expected_inside(cluster, name), await seen_inside(cluster, name)
            written = [(one.mib, one.percent) for one in grants(as_seen(cluster, name))["main"]]
            if wanted != told or [asked[name]] != written:
                words = f"asked for {asked[name]}, was promised {wanted}, was told {told}"
                self.wrong.append(f"{name}: {words}")
            self.served += 1


async def decided(cluster: Cluster, made: Object) -> Object:
    """The pod once it runs or was refused, and no other of its name. Raises TimeoutError."""
    name, uid = name_of(made), made["metadata"]["uid"]
    objects = cluster.pods.objects

    def is_decided() -> bool:
        pod = objects.get(key(name))
        this = pod is not None and pod["metadata"]["uid"] == uid
        return this and (is_up(objects[key(name)]) or phase_of(objects[key(name)]) == "Failed")

    await cluster.pods.until(is_decided, DECIDED_WITHIN, f"{name} neither runs nor fails")
    return objects[key(name)]
