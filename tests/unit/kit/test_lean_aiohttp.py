"""What an import of aiohttp leaves out."""

import subprocess
import sys
from pathlib import Path

import pytest

AUTHORITY = Path(__file__).parents[2] / "vectors" / "tls" / "one.crt"
COUNT = """
import asyncio.sslproto, ssl
from agent.kit import lean_aiohttp
import frozenlist
from aiohttp.connector import _SSL_CONTEXT_VERIFIED as unused
print(len(unused.get_ca_certs()), len(ssl.create_default_context().get_ca_certs()))
print(frozenlist.FrozenList is frozenlist.PyFrozenList)
print(asyncio.sslproto.SSLProtocol.max_size)
"""


@pytest.mark.process
@pytest.mark.timeout(60)
def test_only_a_context_that_is_used_has_the_authorities_and_buffers_hold_two_records():
    done = subprocess.run(  # noqa: S603 -- our own interpreter and text
        [sys.executable, "-c", COUNT],
        check=True,
        capture_output=True,
        text=True,
        env={"SSL_CERT_FILE": str(AUTHORITY), "SSL_CERT_DIR": "/nowhere"},
    )

    assert ["0 1", "True", str(2 * 16 * 1024)] == done.stdout.splitlines()
