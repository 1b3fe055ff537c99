"""What root in a container does to the node by files that it leaves behind.

tests/host/test_hookdirs_hostile.py has whatever else it does to its directory, and full disks;
tests/host/test_regions.py what it does to HAMi-core's region.
"""

import contextlib
from collections.abc import AsyncIterator

from tests.hostile.lab.siege import CLEARED, Attack, AttackTally, Siege, at_work
from tests.process.agent_process import comes


async def test_many_files_of_a_pod_that_is_gone_hold_up_nobody(siege: Siege, many: int):
    """A container has made them, and is gone: the attack is what the agent has to remove."""
    attack = Attack(f"{many:,} files left behind", "10 12", many, 120.0)

    @contextlib.asynccontextmanager
    async def begin(tally: AttackTally) -> AsyncIterator[None]:
        tenant = await siege.node.tenant("tenant")
        words = ("root", "files", *attack.bounds, tenant.directory)
        async with at_work(tally, *words, to_end=True):
            pass
        await siege.node.end(tenant)
        tally.goes_on = tenant.aside
        yield
        assert await comes(lambda: not tenant.aside(), CLEARED), tenant.aside()
        assert not tenant.directory.exists()

    await siege.withstand(attack, begin)
