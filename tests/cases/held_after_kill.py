"""An agent holds a container of low priority back and is killed. The next one has feedback off.

Right: the next agent releases the container. One that observes does not, and says so.
"""

import asyncio
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.cases.box import (
    a_container,
    a_lab,
    a_pod,
    a_raw_region,
    lab_rows,
    put_region,
    ran,
    recent_kernel,
    verdict,
)


def a_pod_of(name: str, priority: int) -> Any:
    """A pod of that priority."""
    container = a_container(mem=4000, cores=30)
    container["resources"]["limits"]["nvidia.com/priority"] = str(priority)
    return a_pod(name, container)


async def play(config: Path) -> tuple[int, int]:
    """The low container's recent_kernel before the kill, and beside the next agent."""
    async with a_lab("--log-level=info", gpus=1) as lab:
        await lab.start_agent()
        await lab.until(lambda: lab.allocatable() == 10, 30)
        for name, priority in (("high", 0), ("low", 1)):
            await ran(lab, a_pod_of(name, priority), 60)
        uuid = str(lab_rows(lab)[0].gpus[0])

        def put(name: str, priority: int, *, is_busy: bool) -> Path:
            raw = a_raw_region(
                [(uuid, 4000 << 20, 30)],
                [(100 << 20, 80 * is_busy)],
                recent=2 * is_busy,
                priority=priority,
                last=int(time.time()) if is_busy else 1,
            )
            return put_region(lab.places.hook, f"{lab.pod(name)['metadata']['uid']}_main", raw)

        low = put("low", 1, is_busy=False)
        for _ in range(20):
            put("high", 0, is_busy=True)
            await asyncio.sleep(1)
            if recent_kernel(low) < 0:
                break
        before = recent_kernel(low)
        await lab.kill_agent()
        put("high", 0, is_busy=False)
        lab.options = dataclasses.replace(lab.options, arguments=("--config", str(config)))
        await lab.start_agent()
        await asyncio.sleep(8)
        return before, recent_kernel(low)


with tempfile.TemporaryDirectory() as made:
    config = Path(made, "config.yaml")
    config.write_text("usage:\n  feedback: false\n")
    before, after = asyncio.run(play(config))
print(f"recent_kernel: {before} before the kill, {after} beside the next agent")
if before >= 0:
    raise RuntimeError("the first agent held nobody back")
verdict(right=after >= 0, wrong="what an agent that was killed held back is never released")
