"""The lab's certificates are good for both of its names, and for no other."""

import ssl
import stat
from pathlib import Path

import pytest

from tests.peers.lab.certificates import Certificates, make_certificates


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path / "tls")


def shake_hands(certificates: Certificates, name: str) -> None:
    """A whole TLS handshake in memory. Raises SSLError where one side refuses."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificates.cert, certificates.key)
    asking = ssl.create_default_context(cadata=certificates.ca_pem.decode())
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(down, up, server_hostname=name)
    server = serving.wrap_bio(up, down, server_side=True)
    waiting = [client, server]
    for _ in range(8):
        for side in list(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
    assert [] == waiting


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_a_client_that_knows_the_authority_trusts_the_server(certificates: Certificates, name: str):
    shake_hands(certificates, name)


def test_another_name_is_refused(certificates: Certificates):
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(certificates, "lab.test")


def test_another_authority_is_refused(certificates: Certificates, tmp_path: Path):
    other = make_certificates(tmp_path / "other")
    mixed = Certificates(
        certificates.ca, certificates.cert, certificates.key, other.key, other.ca_pem
    )

    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(mixed, "localhost")


def test_the_keys_differ_and_are_keys(certificates: Certificates):
    keys = {certificates.key.read_text(), certificates.service_account_key.read_text()}

    assert 2 == len(keys)
    assert all(key.startswith("-----BEGIN EC PRIVATE KEY-----") for key in keys)


def test_only_the_owner_may_read_them(certificates: Certificates):
    folder = certificates.ca.parent

    assert {0o600} == {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert 0o700 == stat.S_IMODE(folder.stat().st_mode)


def test_more_addresses_are_served_where_they_are_asked_for(tmp_path: Path):
    shake_hands(make_certificates(tmp_path / "more", "192.0.2.1"), "192.0.2.1")
