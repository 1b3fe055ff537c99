"""Who asked the API server for what: its audit log, read."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from agent import cluster as annotations

POLICY: Final = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # What is in them tells a sign of life from a report.
        {
            "level": "Request",
            "verbs": ["patch"],
            "resources": [{"group": "", "resources": ["nodes"]}],
        },
        {"level": "Metadata"},
    ],
}
READS: Final = frozenset({"get", "list", "watch"})


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `resource` is plural, with its subresource: `pods/status`."""

    user: str
    client: str
    """Its User-Agent: the agent can have the same user as the kubelet."""
    verb: str
    resource: str
    namespace: str
    name: str
    code: int

    @property
    def is_write(self) -> bool:
        """Whether it changes something."""
        return self.verb not in READS


class AuditLog:
    """The log of one API server. Take a mark, do something, and read what was asked since."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def mark(self) -> int:
        """Where the log ends now."""
        return self._path.stat().st_size if self._path.exists() else 0

    def since(self, mark: int, user: str, client: str = "hami-agent/") -> list[Asked]:
        """The requests of one user and program whose answer began after a mark, in that order.

        Signs of life are left out: every 30 s, and for schedulers before 2.8 alone, the handshake
        and nothing else is written, whatever happens.
        `client` is how its User-Agent begins.

        Raises:
            RuntimeError: the log is another one than when the mark was taken.
        """
        events = (one for one in self.events(mark) if _is_first(one) and not _is_sign_of_life(one))
        asked = (one for one in map(_asked, events) if one.user == user)
        return [one for one in asked if one.client.startswith(client)]

    def events(self, mark: int) -> Iterator[dict[str, Any]]:
        """All complete lines after a mark, as the server wrote them. Raises RuntimeError."""
        with self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < mark:
                raise RuntimeError(f"{self._path} ends before the mark: the server began a new one")
            file.seek(mark)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield msgspec.json.decode(line)


def _is_first(event: dict[str, Any]) -> bool:
    """A watch is told twice: when it opens and when it ends. The first counts."""
    return event["stage"] == "ResponseStarted" or event["verb"] != "watch"


def _is_sign_of_life(event: dict[str, Any]) -> bool:
    """Whether it is a patch that writes `Reported` into the handshake and nothing else."""
    body = event.get("requestObject")
    metadata = body.get("metadata", {}) if isinstance(body, dict) else {}
    notes = metadata.get("annotations") or {}
    stamp = notes.get(annotations.HANDSHAKE) or ""
    return notes.keys() == {annotations.HANDSHAKE} and stamp.startswith("Reported")


def _asked(event: dict[str, Any]) -> Asked:
    about = event.get("objectRef") or {}
    part = about.get("subresource")
    resource = about.get("resource", event["requestURI"])
    return Asked(
        user=event["user"].get("username", ""),  # none: who asked was gone before it was known
        client=event.get("userAgent", ""),
        verb=event["verb"],
        resource=f"{resource}/{part}" if part else resource,
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        code=(event.get("responseStatus") or {}).get("code", 0),
    )


def counted(requests: list[Asked]) -> Counter[str]:
    """How often each `verb resource` was asked."""
    return Counter(f"{asked.verb} {asked.resource}" for asked in requests)
