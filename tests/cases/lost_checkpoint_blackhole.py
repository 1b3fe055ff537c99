"""A kubelet loses its checkpoint; minutes later the containers of two pods die together.

They are refused for ever (HA-2002). Right: good pods that come later run all the same.
"""

import asyncio
from collections import Counter

from tests.cases.box import machine, refusals, verdict
from tests.machine.pods import Box, Shape

SMALL = Shape((Box(mib=300, cores=0),))


async def play(world):
    for number in range(2):
        await world.run_pod(f"old-{number}", SMALL)
    await asyncio.sleep(60)
    await world.restart_kubelet(lose=True)
    await asyncio.sleep(120)
    await world.end_containers(0, 2)
    await asyncio.sleep(30)
    ends = Counter()
    for number in range(10):
        uid = world.create(f"good-{number}", SMALL)
        await world.scheduler.schedule(uid)
        await asyncio.sleep(60)
        for pod in world.pods():
            if pod["metadata"]["uid"] == uid:
                status = pod["status"]
                ids = refusals(status.get("message", ""))[:1]
                ends[" ".join([status.get("phase", "Pending"), *ids])] += 1
    return ends


ends = machine(play, 3)
print("ten good pods in the next ten minutes:", dict(ends))
verdict(
    right=set(ends) == {"Running"},
    wrong="the scheduler goes on to place pods on a node that refuses them, until two are deleted",
)
