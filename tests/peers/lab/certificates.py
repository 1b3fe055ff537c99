"""The lab's own certificate authority: what the API server shows, and signs tokens with."""

from dataclasses import dataclass
from pathlib import Path

import trustme


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

    Raises:
        OSError: A file cannot be written, or is there already.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = trustme.CA(organization_name="hami-agent lab")
    serving = authority.issue_cert("localhost", "127.0.0.1", *more)
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
