"""Doors in whose way something lies: each opens by itself, as soon as it can."""

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from agent.sandbox.lab.cluster import RESOURCE, open_cluster
from agent.sandbox.lab.web import fetch
from tests.process.agent_process import PATIENCE, options

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(60)]

CALL = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/v1beta1.DevicePlugin/Allocate"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


async def test_in_a_directory_that_everybody_may_write_nothing_is_served_until_it_is_mended():
    async with open_cluster(options()) as cluster:
        plugins = cluster.places.plugins
        plugins.chmod(0o1777)
        await cluster.start_agent()

        assert await cluster.until(
            lambda: bool(cluster.log.of("registration.not_serving")), PATIENCE
        ), cluster.log.last(20)
        (line, *_) = cluster.log.of("registration.not_serving")
        assert f"{plugins} is writable by everybody" in str(line.fields["text"])
        assert {"kubelet.sock"} == {path.name for path in plugins.glob("*.sock")}
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        page = await fetch(cluster.web_address or "", "/readyz?verbose")
        assert (503, True) == (page.status, "writable by everybody" in page.text)

        plugins.chmod(0o750)
        assert await cluster.until(lambda: cluster.kubelet.capacity(RESOURCE) == 80, PATIENCE), (
            cluster.log.last(20)
        )


async def test_who_squats_the_port_keeps_nobody_from_the_socket_and_is_told():
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        async with open_cluster(dataclasses.replace(options(), web_port=port)) as cluster:
            await cluster.start_agent()
            path = cluster.places.run / "api.sock"
            assert await cluster.until(path.is_socket, PATIENCE), cluster.log.last(20)

            said = f"[!]web degraded: 127.0.0.1:{port} cannot be bound"
            assert await told(said, lambda: over_unix(path)), cluster.log.last(20)
            # The page says so first.
            assert await cluster.until(lambda: bool(cluster.log.of("service.failed")), PATIENCE)
            assert {"web"} == {one.fields["service"] for one in cluster.log.of("service.failed")}
            assert await cluster.until(lambda: cluster.kubelet.capacity(RESOURCE) == 80, PATIENCE)

            squatter.close()
            assert await told("[+]web ok", lambda: over_unix(path)), cluster.log.last(20)
            assert cluster.web_address is not None


async def test_what_lies_in_the_place_of_the_socket_keeps_nobody_from_the_port():
    async with open_cluster(options()) as cluster:
        path = cluster.places.run / "api.sock"
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        await cluster.start_agent()
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        address = cluster.web_address or ""

        said = f"[!]web_socket degraded: {path} is in the way"
        assert await told(said, lambda: over_tcp(address)), cluster.log.last(20)

        path.unlink()
        assert await told("[+]web_socket ok", lambda: over_tcp(address)), cluster.log.last(20)
        assert "[+]web ok" in await over_unix(path)


async def told(text: str, page: Callable[[], Awaitable[str]]) -> bool:
    """Whether the page says so in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while text not in await page():  # noqa: ASYNC110 -- a page tells nobody that it changed
                await asyncio.sleep(0.05)
            return True
    return False


async def over_tcp(address: str) -> str:
    return (await fetch(address, "/readyz?verbose")).text


async def over_unix(path: Path) -> str:
    connector = aiohttp.UnixConnector(str(path))
    async with (
        aiohttp.ClientSession("http://agent", connector=connector) as client,
        client.get("/readyz?verbose") as answer,
    ):
        return await answer.text()
