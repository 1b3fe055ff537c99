"""etcd and kube-apiserver, with an admin at their door and an audit log."""

import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.peers.lab.api import Api, RefusedError
from tests.peers.lab.audit import POLICY, AuditLog
from tests.peers.lab.certificates import Certificates, make_certificates
from tests.peers.lab.identities import ADMIN, Identities, write_kubeconfig
from tests.peers.lab.part import Part
from tests.peers.lab.ports import free_ports
from tests.peers.lab.space import NodeSpace
from tests.peers.lab.waiting import until_answer

READY: Final = 40.0
"""Seconds that a part may take until it serves, on a machine that is busy."""


@dataclass(eq=False, slots=True)
class ControlPlane:
    """The two programs, their files below `root`, and who may call them."""

    root: Path
    server: str
    certificates: Certificates
    identities: Identities
    etcd: Part
    apiserver: Part
    admin: Api
    audit: AuditLog
    service: str
    """The address of the Service `kubernetes`, as pods are told; see lab/pod_network.py."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order of their start."""
        return (self.etcd, self.apiserver)

    def kubeconfig(self, user: str) -> Path:
        """The kubeconfig of a user that is there from the start."""
        return self.kubeconfig_for(user.replace(":", "-"), self.identities.tokens[user])

    def kubeconfig_for(self, name: str, token: str) -> Path:
        """A kubeconfig for a token."""
        path = self.root / f"{name}.kubeconfig"
        return write_kubeconfig(path, self.server, self.certificates.ca, token)

    def client(self, token: str) -> Api:
        """A client with a token. The caller closes it."""
        return Api(self.server, token, ssl.create_default_context(cafile=self.certificates.ca))

    async def until_ready(self) -> None:
        """Return once the API server serves.

        Raises:
            TimeoutError: it does not; the text holds its last words.
        """
        await until_answer(self._is_ready, READY, self._last_words)

    async def _is_ready(self) -> bool:
        return await self.admin.is_ready() and await self._has_default_namespace()

    def _last_words(self) -> str:
        words = "\n".join(part.tail() for part in self.parts)
        return f"kube-apiserver is not ready\n{words}"

    async def _has_default_namespace(self) -> bool:
        with contextlib.suppress(RefusedError):
            await self.admin.get("/api/v1/namespaces/default")
            return True
        return False

    async def stop(self) -> None:
        """End both, the server first."""
        await self.admin.close()
        await self.apiserver.stop()
        await self.etcd.stop()


@contextlib.asynccontextmanager
async def open_control_plane(
    root: Path, binaries: Path, space: NodeSpace | None = None
) -> AsyncIterator[ControlPlane]:
    """Both started, and ready; stopped at the end.

    Raises:
        TimeoutError, OSError: one of them does not start; the text holds its last words.
    """
    client_port, peer_port, port = free_ports(3)
    logs = root / "logs"
    logs.mkdir(exist_ok=True)
    services = _services(port)
    certificates = make_certificates(root / "certificates", services[1])
    identities = Identities()
    tokens, policy, audit = root / "tokens.csv", root / "audit-policy.json", root / "audit.log"
    tokens.write_text("".join(identities.lines()))
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
        identities=identities,
        etcd=Part("etcd", etcd, logs, space=space),
        apiserver=Part("kube-apiserver", server, logs, space=space),
        admin=Api(url, identities.tokens[ADMIN], context),
        audit=AuditLog(audit),
        service=services[1],
    )
    try:
        for part in plane.parts:
            await part.start()
        await plane.until_ready()
        yield plane
    finally:
        await plane.stop()


def _services(port: int) -> tuple[str, str]:
    """The network of Services and the first address in it: another one beside each server."""
    network = f"10.{port >> 8}.{port & 255}"
    return f"{network}.0", f"{network}.1"
