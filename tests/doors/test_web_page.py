"""The page at `/` through a real socket: who may read it, its policy, and what it costs."""

import asyncio
import base64
import contextlib
import hashlib
import re
from typing import cast

import aiohttp
import pytest
from aiohttp import web

from agent.web.caller import HEADERS
from agent.web.page import door
from agent.web.page.door import PageDoor
from agent.web.policy import ReaderPolicy
from agent.web.readers import Readers
from agent.web.server import Listeners, WebServer
from tests.doors.page_facts import busy

POLICY = "Content-Security-Policy"


@contextlib.asynccontextmanager
async def reading(made=busy, policy=ReaderPolicy.LOCAL):
    """A server of the page of `made()`, and a client of its port."""
    pages = {"/": PageDoor(made, Readers(policy)).page}
    async with (
        WebServer(Listeners("127.0.0.1", 0), pages) as server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client,
    ):
        yield client


@pytest.mark.looptime(False)
async def test_the_page_is_html_and_in_one_piece():
    async with reading() as client, client.get("/") as answer:
        page = await answer.text()

    assert (200, "text/html; charset=utf-8") == (answer.status, answer.headers["Content-Type"])
    assert (True, True) == (page.startswith("<!DOCTYPE html>"), page.endswith("</html>\n"))


@pytest.mark.looptime(False)
async def test_its_policy_admits_exactly_the_style_and_the_script_that_are_in_it():
    async with reading() as client, client.get("/") as answer:
        page, policy = await answer.text(), answer.headers[POLICY]

    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for name in ("style", "script"):
        (content,) = re.findall(f"<{name}>(.*?)</{name}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" == rules.pop(f"{name}-src")
    assert {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    } == rules


@pytest.mark.looptime(False)
async def test_all_else_of_the_protective_headers_is_as_on_every_path():
    async with reading() as client, client.get("/") as page, client.get("/none") as none:
        assert HEADERS == {name: none.headers[name] for name in HEADERS}
        assert {**HEADERS, POLICY: page.headers[POLICY]} == {
            name: page.headers[name] for name in HEADERS
        }


@pytest.mark.looptime(False)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_nothing_is_done_by_it(method):
    async with reading() as client, client.request(method, "/") as answer:
        assert 405 == answer.status


@pytest.mark.looptime(False)
@pytest.mark.parametrize(
    ("host", "policy", "status"),
    [
        ("localhost:9394", ReaderPolicy.LOCAL, 200),
        ("evil.example", ReaderPolicy.LOCAL, 403),
        ("evil.example", ReaderPolicy.ALL, 200),
    ],
)
async def test_a_page_from_elsewhere_cannot_read_it_by_its_own_name(host, policy, status):
    async with reading(policy=policy) as client, client.get("/", headers={"Host": host}) as answer:
        assert status == answer.status


class FarTransport(asyncio.Transport):
    """A connection from another host."""

    def get_extra_info(self, name, default=None):
        return ("10.1.2.3", 40_000) if name == "peername" else default


class FarRequest:
    """A GET of another host."""

    def __init__(self):
        self.path = "/"
        self.headers = {"Host": "localhost"}
        self.transport = FarTransport()


FAR = cast("web.BaseRequest", FarRequest())


async def test_from_another_address_it_is_refused_with_what_to_do_and_in_plain_text():
    answer = PageDoor(busy, Readers()).page(FAR)

    assert (403, "text/plain") == (answer.status, answer.content_type)
    assert POLICY not in answer.headers  # and so the one of every path applies
    for words in ("kubectl port-forward", "web.readers: all", "NetworkPolicy"):
        assert words in (answer.text or "")


@pytest.mark.looptime(False)
async def test_without_facts_yet_a_sentence_is_answered_and_a_browser_asks_again():
    known = []
    async with reading(lambda: known[0] if known else None) as client:
        async with client.get("/") as answer:
            text = await answer.text()
            assert (503, "3") == (answer.status, answer.headers["Refresh"])
            assert text.startswith("This agent stands by or is still loading")
        known.append(busy())
        async with client.get("/") as answer:
            assert 200 == answer.status


async def test_however_many_ask_it_is_rendered_once_in_half_a_second():
    asked = []

    def made():
        asked.append(asyncio.get_running_loop().time())
        return busy(gpus=1)

    page = PageDoor(made, Readers(ReaderPolicy.ALL)).page
    bodies = set()
    for _ in range(3):
        for _ in range(20):
            bodies.add(page(FAR).body)
        await asyncio.sleep(door.KEPT)

    assert (3, 1) == (len(asked), len(bodies))
