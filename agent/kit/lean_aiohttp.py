"""Imports aiohttp without what only takes memory here.

On import aiohttp makes a TLS context for callers that name none; the system's authorities in it
take 1.9 MB and 40 ms. Its lists are in C++, whose library takes 1 MB and which nothing else uses;
without it they are in Python. A TLS connection holds a buffer of 256 KiB, and a record of TLS has
at most 16. As a module is imported once, no two threads replace a name at a time.
"""

import asyncio.sslproto
import ssl
import sys
from typing import Final

BUFFER: Final = 32 * 1024

sys.modules.setdefault("frozenlist._frozenlist", None)  # type: ignore[arg-type] # an ImportError
asyncio.sslproto.SSLProtocol.max_size = BUFFER
_load = ssl.SSLContext.load_default_certs
ssl.SSLContext.load_default_certs = lambda *_: None  # type: ignore[method-assign]
try:
    import aiohttp  # noqa: F401 -- for its effect
finally:
    ssl.SSLContext.load_default_certs = _load  # type: ignore[method-assign]
