"""144 containers of a tenant have regions that take long to read.

Right: the use of the other container is shown, and those of the tenant say why theirs is not.
"""

import asyncio
import json
import os
import time
import urllib.request
from typing import Any

from agent.ledger import container_directory
from tests.cases.box import (
    a_container,
    a_lab,
    a_pod,
    a_raw_region,
    lab_rows,
    put_region,
    ran,
    verdict,
)

HOSTILE = int(os.environ.get("HOSTILE", "144"))


async def play() -> tuple[Any, list[Any]]:
    """What is shown of the good container, and of the others."""
    async with a_lab("--split-count=20", gpus=8) as lab:
        await lab.start_agent()
        await lab.until(lambda: lab.allocatable() == 160, 30)
        await ran(lab, a_pod("good", a_container(mem=500)), 60)
        for number in range(HOSTILE // 12):
            containers = [a_container(f"c{place}", mem=500) for place in range(12)]
            await ran(lab, a_pod(f"bad-{number}", *containers), 60)
        good = a_raw_region([("", 500 << 20, 100)], [(100 << 20, 40)], last=int(time.time()))
        bad = a_raw_region([("", 1 << 30, 30)] * 2, [(1, 1)] * 1024, is_odd=True)
        for row in lab_rows(lab):
            name = container_directory(row.key.pod_uid, row.key.container)
            put_region(lab.places.hook, name, good if row.pod == "good" else bad)
        await asyncio.sleep(20)

        def shown() -> list[Any]:
            with urllib.request.urlopen(f"{lab.web_address}/api/v1/allocations") as answer:
                return json.load(answer)["data"]

        found = await asyncio.to_thread(shown)
        return (
            next(one for one in found if one["pod"] == "good"),
            [one for one in found if one["pod"] != "good"],
        )


good, bad = asyncio.run(play())
used = good["shares"][0]["usedMib"]
silent = [one for one in bad if one["shares"][0]["usedMib"] is None and not one["unread"]]
print(f"good: {used} MiB; {len(bad)} others, {len(silent)} without use and reason")
verdict(right=used == 100 and not silent, wrong="one tenant takes away the use of all others")
