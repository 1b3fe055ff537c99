"""etcd and kube-apiserver, with an admin at their door and an audit log."""

import contextlib
import itertools
import json
import os
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import trustme

from agent import cluster as annotations
from tests.peers.lab.api import Api, RefusedError
from tests.peers.lab.part import NodeSpace, Part, until_answer

NODE: Final = "node-a"
NODE_PATH: Final = f"/api/v1/nodes/{NODE}"
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


_USERS: Final = (ADMIN, NODE_USER, SCHEDULER, CONTROLLERS, EXTENDER)
"""Those that are there from the start, each with a token."""


def write_tokens(path: Path) -> dict[str, str]:
    """A token for each user; the file is kube-apiserver's --token-auth-file."""
    tokens = {user: secrets.token_hex(16) for user in _USERS}
    groups = {user: f',"{group}"' for user, group in _GROUPS.items()}
    path.write_text(
        "".join(f"{token},{user},{user}{groups.get(user, '')}\n" for user, token in tokens.items())
    )
    return tokens


# The lab's own certificate authority: what the API server shows, and signs tokens with.


class Certificates:
    """PEM files of a new authority, in a folder that is made; only their owner may go there.

    `more` are names and addresses by which the server is called besides localhost and 127.0.0.1.
    """

    def __init__(self, folder: Path, *more: str) -> None:
        folder.mkdir(mode=0o700)
        files = [folder / one for one in ("ca.crt", "server.crt", "server.key", "accounts.key")]
        self.ca, self.cert, self.key, self.service_account_key = files
        authority = trustme.CA(organization_name="hami-agent lab")
        # The API server also goes to kubelets with it, for exec; a group is an organization there.
        serving = authority.issue_cert(
            *("localhost", "127.0.0.1", *more),
            common_name="kube-apiserver",
            organization_name="system:masters",
        )
        authority.cert_pem.write_to_path(self.ca)
        for one in serving.cert_chain_pems:
            one.write_to_path(self.cert, append=True)
        serving.private_key_pem.write_to_path(self.key)
        # Any key will do to sign tokens of service accounts; its certificate is thrown away.
        signing = authority.issue_cert("service-accounts")
        signing.private_key_pem.write_to_path(self.service_account_key)


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


# Who asked the API server for what: its audit log, read.

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


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `resource` is plural, with its subresource: `pods/status`."""

    user: str
    client: str
    """Its User-Agent: the agent can have the same user as the kubelet."""
    verb: str
    resource: str
    code: int


class AuditLog:
    """The log of one API server. Take a mark, do something, and read what was asked since."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def mark(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def since(self, mark: int, user: str, client: str = "hami-agent/") -> list[Asked]:
        """The requests of one user and program whose answer began after a mark, in that order.

        Signs of life are left out: every 30 s, and for schedulers before 2.8 alone, the handshake
        and nothing else is written, whatever happens.
        `client` is how its User-Agent begins.
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
        code=(event.get("responseStatus") or {}).get("code", 0),
    )


def counted(requests: list[Asked]) -> Counter[str]:
    """How often each `verb resource` was asked."""
    return Counter(f"{asked.verb} {asked.resource}" for asked in requests)


_DEFAULT: Final = "/api/v1/namespaces/default"
READY: Final = 40.0
"""Seconds that a part may take until it serves, on a machine that is busy."""


@dataclass(eq=False, slots=True)
class ControlPlane:
    """The two programs, their files below `root`, and who may call them."""

    root: Path
    server: str
    certificates: Certificates
    tokens: dict[str, str]
    """By user."""
    etcd: Part
    apiserver: Part
    admin: Api
    audit: AuditLog
    service: str
    """The address of the Service `kubernetes`, as pods are told."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.etcd, self.apiserver)

    def kubeconfig(self, user: str) -> Path:
        """The kubeconfig of a user that is there from the start."""
        return self.kubeconfig_for(user.replace(":", "-"), self.tokens[user])

    def kubeconfig_for(self, name: str, token: str) -> Path:
        """A kubeconfig for one token, below `root`; JSON is YAML too."""
        authority = str(self.certificates.ca)
        cluster = {"server": self.server, "certificate-authority": authority}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "peers", "cluster": cluster}],
            "users": [{"name": "peers", "user": {"token": token}}],
            "contexts": [{"name": "peers", "context": {"cluster": "peers", "user": "peers"}}],
            "current-context": "peers",
        }
        path = self.root / f"{name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(document, indent=2))
        return path

    def client(self, token: str) -> Api:
        """A client with a token. The caller closes it."""
        return Api(self.server, token, ssl.create_default_context(cafile=self.certificates.ca))

    async def until_ready(self) -> None:
        await until_answer(self._is_ready, READY, self._last_words)

    async def _is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError, RefusedError):
            return bool(await self.admin.get("/readyz") and await self.admin.get(_DEFAULT))
        return False

    def _last_words(self) -> str:
        return "kube-apiserver is not ready\n" + "\n".join(part.tail() for part in self.parts)


@contextlib.asynccontextmanager
async def open_control_plane(
    root: Path, binaries: Path, space: NodeSpace | None = None
) -> AsyncIterator[ControlPlane]:
    client_port, peer_port, port = free_ports(3)
    logs = root / "logs"
    logs.mkdir(exist_ok=True)
    services = _services(port)
    certificates = Certificates(root / "certificates", services[1])
    tokens, policy, audit = root / "tokens.csv", root / "audit-policy.json", root / "audit.log"
    known = write_tokens(tokens)
    policy.write_text(json.dumps(POLICY))
    etcd_url, peer_url = (f"http://127.0.0.1:{one}" for one in (client_port, peer_port))
    etcd = (
        str(binaries / "etcd"),
        *("--name=peers", f"--data-dir={root / 'etcd'}", "--unsafe-no-fsync"),
        *(f"--listen-client-urls={etcd_url}", f"--advertise-client-urls={etcd_url}"),
        *(f"--listen-peer-urls={peer_url}", f"--initial-advertise-peer-urls={peer_url}"),
        *(f"--initial-cluster=peers={peer_url}", "--log-level=warn"),
    )
    server = (
        str(binaries / "kube-apiserver"),
        *(f"--etcd-servers={etcd_url}", "--bind-address=127.0.0.1", f"--secure-port={port}"),
        *("--advertise-address=127.0.0.1", f"--service-cluster-ip-range={services[0]}/24"),
        *(f"--tls-cert-file={certificates.cert}", f"--tls-private-key-file={certificates.key}"),
        f"--kubelet-client-certificate={certificates.cert}",
        f"--kubelet-client-key={certificates.key}",
        *(f"--token-auth-file={tokens}", "--authorization-mode=Node,RBAC"),
        *("--enable-admission-plugins=NodeRestriction", "--allow-privileged"),
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={certificates.service_account_key}",
        f"--service-account-signing-key-file={certificates.service_account_key}",
        # Megabytes: a log that is rotated has lost what a test counts.
        *(f"--audit-policy-file={policy}", f"--audit-log-path={audit}"),
        "--audit-log-maxsize=100000",
        *("--endpoint-reconciler-type=none", "--anonymous-auth=false"),
    )
    url = f"https://127.0.0.1:{port}"
    context = ssl.create_default_context(cafile=certificates.ca)
    plane = ControlPlane(
        root=root,
        server=url,
        certificates=certificates,
        tokens=known,
        etcd=Part("etcd", etcd, logs, space=space),
        apiserver=Part("kube-apiserver", server, logs, space=space),
        admin=Api(url, known[ADMIN], context),
        audit=AuditLog(audit),
        service=services[1],
    )
    try:
        for part in plane.parts:
            await part.start()
        await plane.until_ready()
        yield plane
    finally:
        await plane.admin.close()
        await plane.apiserver.stop()
        await plane.etcd.stop()


def _services(port: int) -> tuple[str, str]:
    """The network of Services and the first address in it: another one beside each server."""
    network = f"10.{port >> 8}.{port & 255}"
    return f"{network}.0", f"{network}.1"
