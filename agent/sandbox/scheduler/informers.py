"""The scheduler's copies of pods and nodes from its watches.

Source: client-go's informers, from whose listers HAMi 2.9 and later read in Bind.
"""

from agent.sandbox.api_errors import Json


class Informers:
    """Objects by name. Reading makes no request and may be late."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str, str], Json] = {}

    def see(self, resource: str, kind: str, obj: Json) -> None:
        """Take in an object that was ADDED, MODIFIED or DELETED."""
        metadata = obj["metadata"]
        key = (resource, metadata.get("namespace", ""), metadata["name"])
        if kind != "DELETED":
            self._objects[key] = obj
        elif self._is_same(key, metadata.get("uid")):
            del self._objects[key]

    def get(self, resource: str, namespace: str, name: str) -> Json | None:
        """The object as it was last seen, or None."""
        return self._objects.get((resource, namespace, name))

    def retain_pods(self, uids: frozenset[str]) -> None:
        """Drop all pods except these: the others were deleted while no watch was open."""
        for key, obj in list(self._objects.items()):
            if key[0] == "pods" and obj["metadata"]["uid"] not in uids:
                del self._objects[key]

    def _is_same(self, key: tuple[str, str, str], uid: str | None) -> bool:
        held = self._objects.get(key)
        return held is not None and held["metadata"].get("uid") == uid
