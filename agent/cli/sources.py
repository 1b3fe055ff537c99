"""Where a command reads the status of a node from. Each answer names its source and its time."""

import argparse
import asyncio
import datetime as dt
import difflib
import stat
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent.cli.connections import NO_KUBECONFIG, Unreachable, call, connection_of, open_session
from agent.cli.output import working
from agent.errors import AgentError, ApiError, MalformedText, SettingsError, cap
from agent.host.process import SystemClock
from agent.kube.api import EndlessList
from agent.kube.client import Connection
from agent.kube.reader import NodeReader
from agent.status import StatusDocument, observed_status, open_envelope

PROGRAM: Final = "hami-agent-status"
NEAREST: Final = 3


class NoSuchNode(AgentError):  # noqa: N818 -- names what was found
    """The cluster has no Node of that name."""


DEADLINE: Final = 5.0
MEMBER: Final = "hami-agent/status.json"
LARGEST: Final = 8 * 1024 * 1024
"""Bytes of the status in a bundle."""
LARGEST_ARCHIVE: Final = LARGEST + (1 << 20)
"""Bytes of a bundle that are read, packed and unpacked: the verb `bundle` writes MEMBER first."""
CHUNK: Final = 4096
"""Packed bytes that are unpacked at once: they are a thousand times as many then, at most."""
MEMBERS: Final = 100
FILE: Final = (tarfile.REGTYPE, tarfile.AREGTYPE)
FOUND: Final = 200


class SourceUnreachable(AgentError):  # noqa: N818 -- names what happened
    """No source answers."""


class StatusRead(msgspec.Struct, frozen=True):
    """The status of a node. `at`: when the source made it. `missing`: what it does not know."""

    found: StatusDocument
    at: dt.datetime
    source: str
    missing: str = ""


def status_at(socket: Path) -> StatusRead:
    """The status by the agent's socket. Raises SourceUnreachable."""
    try:
        status, text = call(socket, "GET", "/api/v1/status", DEADLINE)
        if status != FOUND:
            raise SourceUnreachable(f"{socket}: {cap(text)}")
        found, at = open_envelope(text.encode(), "Status", StatusDocument)
    except Unreachable as error:
        raise SourceUnreachable(str(error)) from error
    except MalformedText as error:
        raise SourceUnreachable(f"{socket} did not answer as an agent: {error}") from error
    return StatusRead(found, at, str(socket))


def status_in(bundle: Path) -> StatusRead:
    """The status in an archive of `hami-agent bundle`. Raises SourceUnreachable."""
    try:
        if not stat.S_ISREG(bundle.stat().st_mode):  # a pipe may block for ever
            text = "is not a regular file; name an archive of `hami-agent bundle`"
            raise SourceUnreachable(f"{bundle} {text}")
        found, at = open_envelope(_member_of(bundle), "Status", StatusDocument)
    except OSError as error:
        raise SourceUnreachable(f"{bundle} cannot be read: {error.strerror or error}") from error
    except (tarfile.TarError, zlib.error) as error:
        raise SourceUnreachable(f"{bundle} is not an archive of `hami-agent bundle`") from error
    except MalformedText as error:
        raise SourceUnreachable(f"{bundle}: {error}") from error
    return StatusRead(found, at, str(bundle))


def _member_of(bundle: Path) -> bytes:
    """The bytes of MEMBER. Raises SourceUnreachable, OSError, TarError, zlib.error.

    `gzip` and `tarfile` believe an archive that asks for GiB for a name. This reads a bounded part
    of it, and only plain members, as the verb `bundle` writes them.
    """
    unpack, text = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16), bytearray()
    with bundle.open("rb") as file:
        for _ in range(0, LARGEST_ARCHIVE, CHUNK):
            packed = file.read(CHUNK)
            text += unpack.decompress(packed, LARGEST_ARCHIVE - len(text))
            if not packed or unpack.eof or len(text) == LARGEST_ARCHIVE:
                break
    at = 0
    for _ in range(MEMBERS):
        header = bytes(text[at : at + tarfile.BLOCKSIZE])
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        at += tarfile.BLOCKSIZE
        if member.name == MEMBER:
            break
        if member.type not in (*FILE, tarfile.DIRTYPE) or member.size < 0:
            raise tarfile.ReadError("it has a member that `hami-agent bundle` does not write")
        at += -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    else:
        raise tarfile.ReadError("it has more members than `hami-agent bundle` writes")
    if member.type not in FILE or not 0 <= member.size <= LARGEST:
        raise SourceUnreachable(f"{bundle}: {MEMBER} is not a file of at most 8 MiB")
    return bytes(memoryview(text)[at : at + member.size])


def status_of(
    node: str, resource: str, args: argparse.Namespace, environ: Mapping[str, str]
) -> StatusRead:
    """The status of a node of the cluster, from its agent or from its objects.

    Raises SourceUnreachable, NoSuchNode.
    """
    connection = connection_of(args, environ)
    if connection is None:
        raise SourceUnreachable(NO_KUBECONFIG)
    try:
        with working(f"reading {cap(node, 64)}"):
            return asyncio.run(_read_node(connection, node, resource, ask=not args.objects))
    except (SettingsError, ApiError) as error:
        raise SourceUnreachable(str(error)) from error


async def _read_node(connection: Connection, node: str, resource: str, *, ask: bool) -> StatusRead:
    """Read the agent of the node through the API server; where it does not answer, the objects.

    Without `ask` the objects at once, which are what HAMi's scheduler reads.

    Raises:
        SettingsError: the files of the connection cannot be used.
        NoSuchNode: there is no such Node; the text has the nearest names.
        ApiError: the Node or its pods cannot be read.
    """
    source, missing = f"API server by {connection.source}", ""
    async with open_session(connection, PROGRAM) as session:
        reader = NodeReader(session, node)
        try:
            if ask:
                found, at = open_envelope(await reader.by_agent(), "Status", StatusDocument)
                return StatusRead(found, at, f"agent of {node} through the {source}")
        except EndlessList:
            raise  # its objects would not end either
        except (ApiError, MalformedText) as error:
            missing = f"only what its objects show, because the agent was not read: {error}"
        at = SystemClock().now()
        seen = await reader.node()
        if seen is None:
            known = await reader.names()
            near = difflib.get_close_matches(node, known, n=NEAREST, cutoff=0.5) or known[:NEAREST]
            there = f"; the nearest names are {', '.join(near)}" if near else ""
            raise NoSuchNode(f"the cluster has no Node {node}{there}")
        pods = await reader.pods(resource)
        try:
            found = observed_status(seen, pods, resource, at)
        except MalformedText as error:
            raise ApiError(f"the register annotation of {node} cannot be read: {error}") from error
        return StatusRead(found, at, source if ask else f"objects of the {source}", missing)
