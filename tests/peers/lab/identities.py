"""Who may call the API server in a test cluster, and with which token."""

import itertools
import json
import os
import secrets
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trustme

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


# The lab's own certificate authority: what the API server shows, and signs tokens with.


@dataclass(frozen=True)
class Certificates:
    """PEM files that only their owner may read."""

    ca: Path
    cert: Path
    """Serves localhost, 127.0.0.1 and what else was asked for; the authority is not in it."""
    key: Path
    service_account_key: Path
    """Signs the tokens of service accounts; its public half, which checks them, is in it too."""
    ca_pem: bytes


def make_certificates(folder: Path, *more: str) -> Certificates:
    """Write a new authority and what it vouches for into `folder`, made where it is missing.

    `more` are names and addresses by which the server is called besides.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = trustme.CA(organization_name="hami-agent lab")
    # The API server also goes to kubelets with it, for exec; a group is an organization there.
    serving = authority.issue_cert(
        *("localhost", "127.0.0.1", *more),
        common_name="kube-apiserver",
        organization_name="system:masters",
    )
    # Any key will do; this one's certificate is thrown away.
    signing = authority.issue_cert("service-accounts")
    ca_pem = authority.cert_pem.bytes()
    return Certificates(
        ca=_written(folder / "ca.crt", ca_pem),
        cert=_written(folder / "server.crt", b"".join(c.bytes() for c in serving.cert_chain_pems)),
        key=_written(folder / "server.key", serving.private_key_pem.bytes()),
        service_account_key=_written(
            folder / "service-accounts.key", signing.private_key_pem.bytes()
        ),
        ca_pem=ca_pem,
    )


def _written(path: Path, content: bytes) -> Path:
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(content)
    return path


# Free ports of the loopback interface, which stay free while a server is away.

_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST: Final = 15000
"""Below it, programs of a node have ports of their own."""
_STRIDE: Final = 211
"""Between where one process begins and where the next one does: they run side by side."""


def _ports() -> Iterator[int]:
    """Of those that the kernel gives no client as its source port, unless that is nearly all."""
    low = int(_EPHEMERAL.read_text().split()[0])
    count = (low if low > _LOWEST + 1000 else 65536) - _LOWEST
    for number in range(count):
        port = _LOWEST + (os.getpid() * _STRIDE + number) % count
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port


_LEFT: Final = _ports()


def free_ports(count: int) -> list[int]:
    """So many different ports on which nobody listens now; never again the same in this process.

    A server that is started again needs its port again. Raises RuntimeError: none is left.
    """
    taken = list(itertools.islice(_LEFT, count))
    if len(taken) < count:
        raise RuntimeError("all ports for servers were used, or others listen on them")
    return taken
