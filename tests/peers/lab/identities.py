"""Who may call the API server in a test cluster, and with which token."""

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

NODE: Final = "node-a"
ADMIN: Final = "admin"
NODE_USER: Final = f"system:node:{NODE}"
SCHEDULER: Final = "system:kube-scheduler"
CONTROLLERS: Final = "system:kube-controller-manager"
EXTENDER: Final = "hami-scheduler"
_GROUPS: Final = {
    ADMIN: "system:masters",
    NODE_USER: "system:nodes",
    EXTENDER: "system:masters",  # HAMi's chart binds its scheduler to cluster-admin
}


@dataclass(frozen=True, slots=True)
class Identities:
    """A token for each user that is there from the start."""

    tokens: dict[str, str] = field(
        default_factory=lambda: {
            user: secrets.token_hex(16)
            for user in (ADMIN, NODE_USER, SCHEDULER, CONTROLLERS, EXTENDER)
        }
    )

    def lines(self) -> Iterable[str]:
        """kube-apiserver's --token-auth-file."""
        for number, (user, token) in enumerate(self.tokens.items()):
            group = f',"{_GROUPS[user]}"' if user in _GROUPS else ""
            yield f"{token},{user},{number}{group}\n"


def write_kubeconfig(path: Path, server: str, authority: Path, token: str) -> Path:
    """A kubeconfig for one token at one server, readable by its owner; JSON is YAML too."""
    name = "peers"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": name, "cluster": {"server": server, "certificate-authority": str(authority)}}
        ],
        "users": [{"name": name, "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(document, indent=2))
    return path
