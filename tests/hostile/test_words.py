"""What tenants and strangers say reaches a log that people read: no word of it forges a line."""

import contextlib
import re
from collections.abc import AsyncIterator

from agent.sandbox.api_errors import Json
from agent.sandbox.lab.cluster import NAMESPACE, NODE
from agent.sandbox.scenario.workloads import Wish, Workload
from tests.hostile.lab.attackers import AttackTally, at_work, finished
from tests.hostile.lab.node import open_node
from tests.hostile.lab.siege import Attack, Siege
from tests.hostile.lab.table import AttackTable
from tests.hostile.lab.working import NOBODY
from tests.peers.lab.ports import free_ports

LINE = re.compile(r"\d\d:\d\d:\d\d [a-z]+ +[a-z_]+\.[a-z_]+ | {2}|$")
"""How a line of the text log begins; what belongs to the one before is indented."""
OBEYED = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
"""What a terminal obeys."""
FORGED = "\nforged 12:00:00 error   all.lost \x1b[2J\x1b]0;forged\x07\r\u009b31m"

TEXTS = (FORGED, f"{FORGED}:;", f"GPU-0,{FORGED},1,1:;")


def hostile(name: str, text: str) -> Json:
    """A pod that its author bound to the node, with that text in all that the agent reads."""
    pod = Workload(name, "", (Wish("main", 1, 256),)).pod()
    keys = ("vgpu-devices-allocated", "vgpu-devices-to-allocate", "bind-phase", "vgpu-node")
    pod["metadata"]["annotations"] = {f"hami.io/{key}": text for key in keys}
    pod["spec"]["nodeName"] = NODE
    return pod


async def test_no_name_or_text_of_a_stranger_forges_a_line_of_the_log(table: AttackTable):
    attack = Attack("words that forge lines of the log", "12 31", 4_000, 30.0, 400.0)
    async with open_node(log="text", web_port=free_ports(1)[0]) as node:
        siege, store = Siege(node, table), node.cluster.store

        @contextlib.asynccontextmanager
        async def begin(tally: AttackTally) -> AsyncIterator[None]:
            async with siege.a_tenant() as tenant:
                await finished(tally, "tenant", tenant.directory, "names", *attack.bounds)
            for number, text in enumerate(TEXTS):
                store.create("pods", hostile(f"words-{number}", text))
            where = (f"{node.port}", node.roots_door)
            async with at_work(tally, "webber", f"{NOBODY}", "garbage", *attack.bounds, *where):
                yield
            for number, _ in enumerate(TEXTS):
                store.delete("pods", NAMESPACE, f"words-{number}")
            await siege.until_removed(tenant)

        await siege.withstand(attack, begin)

        lines = [line.text for line in node.cluster.log]
        assert 100 < len(lines)
        assert [] == [line for line in lines if not LINE.match(line) or OBEYED.search(line)]
