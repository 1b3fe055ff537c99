"""HAMi's dashboard, and the series of HAMi's scheduler that it joins with those of the agents."""

import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Final

from aiohttp import web

from tests.shape import tree

FACTS: Final[dict[str, Any]] = json.loads(tree.text("tests/vectors/hami-dashboard.json"))
VARIABLES: Final = {"$node": ".*", "$namespace": ".*"}
LIMIT: Final = "hami_gpu_memory_limit_bytes"
"""The one series of the scheduler that the dashboard joins with the monitor's."""


def asked() -> Iterator[tuple[str, frozenset[str]]]:
    """The expression of each panel of HAMi's dashboard, with everything chosen, and its series."""
    for panel in FACTS["panels"]:
        expression = panel["expr"]
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        yield expression, frozenset(re.findall(r"\bhami_\w+", expression))


def choices() -> Iterator[str]:
    """The series with the labels of which each variable of the dashboard lists the values."""
    for variable in FACTS["variables"]:
        (found,) = re.findall(r"label_values\((\w+), (\w+)\)", variable["query"])
        yield '{}{{{}!=""}}'.format(*found)


def served_by_agents() -> frozenset[str]:
    """HAMi's series that METRICS.md lists."""
    listed = re.findall(r"^\| `(\w+)` \| gauge \|", tree.text("METRICS.md"), re.MULTILINE)
    own = ("hami_agent_", "process_", "python_")
    return frozenset(name for name in listed if not name.startswith(own))


@contextlib.asynccontextmanager
async def open_scheduler(node: str, uuids: Iterable[str]) -> AsyncIterator[str]:
    """A stand-in for HAMi's scheduler, with its limit of each GPU. Returns its host:port."""
    page = f"# TYPE {LIMIT} gauge\n" + "".join(
        f'{LIMIT}{{device_index="{index}",device_type="NVIDIA H100",device_uuid="{uuid}",'
        f'node="{node}",zone="vGPU"}} 8.5e10\n'
        for index, uuid in enumerate(uuids)
    )

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=page)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()
