"""What an agent tells: over HTTP its probes and its metrics, in its log whom it answered."""

from collections import Counter
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.peers.lab.agents import Agent
from tests.peers.lab.space import until

_DEADLINE: Final = aiohttp.ClientTimeout(total=5.0)


def web_ports(agent: Agent) -> list[int]:
    """The ports that it opened since its start, in order: a standby that takes over opens another.

    A port of an earlier start does not count: nobody listens there, or another program does.
    """
    return [line["port"] for line in agent.events_since_start("web.listening") if "port" in line]


async def page(agent: Agent, path: str) -> tuple[int, str]:
    """Status and text of a page at the port that it opened last."""
    await until(lambda: bool(web_ports(agent)), 10.0, agent.part.tail)
    url = f"http://127.0.0.1:{web_ports(agent)[-1]}{path}"
    async with aiohttp.ClientSession(timeout=_DEADLINE) as session, session.get(url) as answer:
        return answer.status, await answer.text()


async def is_ready(agent: Agent) -> bool:
    """Whether its readiness probe passes."""
    try:
        code, _ = await page(agent, "/readyz")
    except (aiohttp.ClientError, TimeoutError):
        return False
    return code == 200


async def readings(agent: Agent, **labels: str) -> dict[str, float]:
    """The metrics that have exactly these labels."""
    _, text = await page(agent, "/metrics")
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels == labels
    }


def answers(agent: Agent) -> Counter[tuple[str, str]]:
    """How often each container was answered, by pod and container."""
    return Counter((one["pod"], one["ctr"]) for one in agent.events("alloc.answered"))
