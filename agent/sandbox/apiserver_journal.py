"""Records the requests to the API server model: the latest calls, and counts of all calls."""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

WRITES: Final = frozenset({"create", "patch", "update", "delete"})


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request and the code of its answer; `verb` is Kubernetes' (get, list, watch, …)."""

    user: str
    verb: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int


class Journal:
    """Keeps a bounded number of calls, and counts all calls since the start."""

    def __init__(self, limit: int = 10_000) -> None:
        self.calls: deque[ApiCall] = deque(maxlen=limit)
        self.counts: Counter[tuple[str, str, str]] = Counter()

    def note(self, call: ApiCall) -> None:
        """Record one call, also a refused one."""
        self.calls.append(call)
        self.counts[call.user, call.verb, call.resource] += 1

    def writes(self, user: str) -> int:
        """How many writes the user tried."""
        return sum(
            count for (who, verb, _), count in self.counts.items() if who == user and verb in WRITES
        )

    def reads(self, user: str) -> int:
        """How many reads the user tried, watches not included."""
        return sum(
            count
            for (who, verb, _), count in self.counts.items()
            if who == user and verb in ("get", "list")
        )

    def watches(self, user: str) -> int:
        """How many watches the user started."""
        return sum(
            count
            for (who, verb, _), count in self.counts.items()
            if who == user and verb == "watch"
        )
