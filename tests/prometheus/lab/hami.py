"""HAMi's dashboard, and the series of HAMi's scheduler that it joins with those of the agents."""

import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Final

from aiohttp import web

from tests.shape import tree

FACTS: Final = "tests/vectors/hami-dashboard.json"
SERIES: Final = re.compile(r"\bhami_\w+")
VARIABLES: Final = {"$node": ".*", "$namespace": ".*"}
LIMIT: Final = "hami_gpu_memory_limit_bytes"
"""The one series of the scheduler that the dashboard joins with the monitor's."""


def asked() -> Iterator[tuple[str, str]]:
    """Title and expression of each panel of HAMi's dashboard, with everything chosen."""
    for panel in _facts()["panels"]:
        expression = panel["expr"]
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        yield panel["title"], expression


def choices() -> Iterator[tuple[str, str]]:
    """The series and the label of which each variable of the dashboard lists the values."""
    for variable in _facts()["variables"]:
        (found,) = re.findall(r"label_values\((\w+), (\w+)\)", variable["query"])
        yield found


def series_of(expression: str) -> frozenset[str]:
    """The names of HAMi's series in an expression."""
    return frozenset(SERIES.findall(expression))


def served_by_agents() -> frozenset[str]:
    """HAMi's series that METRICS.md lists."""
    listed = re.findall(r"^\| `(\w+)` \| gauge \|", tree.text("METRICS.md"), re.MULTILINE)
    own = ("hami_agent_", "process_", "python_")
    return frozenset(name for name in listed if not name.startswith(own))


def legacy_names() -> Sequence[str]:
    """The older names of the series, as METRICS.md lists them."""
    return sorted(name for name in served_by_agents() if not name.startswith("hami_"))


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
        host, port = runner.addresses[0][:2]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


def _facts() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tree.text(FACTS))
    return found
