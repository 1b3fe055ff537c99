"""Who may read the API and the page: they name pods, which not everybody on a network may see."""

import ipaddress
from typing import Final

import msgspec

from agent.web import aiohttp_server as web
from agent.web.policy import ReaderPolicy

LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Readers(msgspec.Struct, frozen=True):
    """Judges a request for what names pods. The unix socket is guarded by its permissions."""

    policy: ReaderPolicy = ReaderPolicy.LOCAL

    def refused(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to somebody who may not read; None: he may.

        With LOCAL a browser must name this host as local: else a page from elsewhere could let its
        own name point here, and read the answer (DNS rebinding).
        """
        if self.policy is ReaderPolicy.ALL or _peer(request) == "":
            return None
        if not _is_loopback(_peer(request)):
            text = (
                f"{request.path} is served to this host only, because it names pods. Use "
                "`kubectl port-forward` to the agent's pod, an SSH tunnel, or `hami-agent status` "
                "on the node. With `web.readers: all`, everybody who reaches this port may read: "
                "then bind web.address to a protected network, or use a NetworkPolicy."
            )
            return web.Response(status=403, text=text + "\n")
        host = request.headers.get("Host", "")
        if _name(host) not in LOCAL_HOSTS:
            text = "Ask by the name localhost or 127.0.0.1: other names are not answered here."
            return web.Response(status=403, text=text + "\n")
        return None


def _peer(request: web.BaseRequest) -> str:
    """The caller's address; empty on a unix socket."""
    transport = request.transport
    peer = transport.get_extra_info("peername") if transport else None
    if isinstance(peer, tuple):
        return str(peer[0])
    return "" if transport is not None else "closed"


def _is_loopback(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _name(host: str) -> str:
    """The host of a Host header, without its port."""
    name, _, port = host.rpartition(":")
    return name.lower() if name and port.isdigit() else host.lower()
