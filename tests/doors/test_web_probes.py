"""Probes say what the API server's say: ok, or a line for each check, a sentence for a failure."""

import json

import pytest

from agent.node.findings import Check
from agent.web.api import BuildInfo, Probes
from tests.doors.web_client import ask

pytestmark = pytest.mark.looptime(False)

STATE = Check("state", ok=True)
STREAM = Check("stream", ok=False, text="the kubelet\nhas no list stream open")
API = Check("api", ok=False, text="the pod watch is down", required=False)


def pages(*, age=0.5, checks=(STATE,)):
    probes = Probes(lambda: age, lambda: tuple(checks))
    return {"/livez": probes.livez, "/healthz": probes.livez, "/readyz": probes.readyz}


async def get(path, **facts):
    return (await ask(pages(**facts), path))[:2]


@pytest.mark.parametrize("path", ["/livez", "/healthz"])
async def test_a_turning_loop_is_alive_whatever_readiness_says(path):
    assert (200, "ok") == await get(path, age=14.9, checks=(STREAM,))


async def test_a_stuck_loop_is_not_alive():
    expected = "[-]loop failed: the last heartbeat is 15 s old\nlivez check failed\n"

    assert (503, expected) == await get("/livez", age=15.0)


async def test_ready_is_ok_in_a_word():
    assert (200, "ok") == await get("/readyz")


async def test_verbose_lists_every_check():
    assert (200, "[+]state ok\nreadyz check passed\n") == await get("/readyz?verbose")


async def test_a_failed_check_is_a_503_with_its_sentence_on_one_line():
    expected = (
        "[+]state ok\n[-]stream failed: the kubelet has no list stream open\nreadyz check failed\n"
    )

    assert (503, expected) == await get("/readyz", checks=(STATE, STREAM))
    assert (503, expected) == await get("/readyz?verbose=1", checks=(STATE, STREAM))


async def test_what_is_degraded_is_listed_and_ready():
    line = "[!]api degraded: the pod watch is down\n"

    assert (200, f"ok\n{line}") == await get("/readyz", checks=(STATE, API))
    assert (200, f"[+]state ok\n{line}readyz check passed\n") == await get(
        "/readyz?verbose", checks=(STATE, API)
    )


@pytest.mark.parametrize("query", ["?standby", "?standby&verbose"])
async def test_a_standby_is_ready_for_who_asks_for_one_and_says_what_it_is(query):
    standby = Check("instance", ok=False, text="standby: another agent runs")

    status, text = await get(f"/readyz{query}", checks=(standby,))
    assert 200 == status
    assert "[!]instance degraded: standby: another agent runs\n" in text
    assert 503 == (await get("/readyz", checks=(standby,)))[0]
    assert 503 == (await get(f"/readyz{query}", checks=(standby, STREAM)))[0]


async def test_a_check_without_words_says_so():
    _, text = await get("/readyz", checks=(Check("server", ok=False),))

    assert "[-]server failed: no reason given\n" in text


async def test_version_is_json():
    build = BuildInfo(version="0.1.0", python="3.11.7", revision="abc", schema="1")

    status, text, headers = await ask({"/version": build.page}, "/version")

    assert (200, "application/json") == (status, headers["Content-Type"])
    assert {
        "version": "0.1.0",
        "python": "3.11.7",
        "revision": "abc",
        "schema": "1",
        "profile": "json",
    } == json.loads(text)
