"""A kubelet loses its checkpoint; a container that ran when it started dies before its admission.

The pod has c0 (500 MiB) and c1 (900 MiB). c1 is dead when the kubelet starts; c0 runs then and dies
afterwards. The kubelet asks for c1 alone, for it skips what ran when it started. PodResources never
fails. Right: c1's share, or a refusal.
"""

import asyncio

from tests.cases.box import answers_of_another, machine, verdict
from tests.machine.pods import Box, Shape

GAPS = (0.1, 0.3, 0.5, 0.7)
"""Seconds from the kubelet's start to the death of c0."""


def wrong_answers(seed: int, gap: float) -> list[str]:
    wrong: list[str] = []

    async def play(world):
        answers_of_another(world, wrong)
        uid = await world.run_pod("p", Shape((Box(mib=500, cores=0), Box(mib=900, cores=0))))
        await asyncio.sleep(60)

        async def die(name):
            if (uid, name) in world.running():
                await world.kubelet.container_died(uid, name)

        await world.kubelet.kill()
        await die("c1")
        world.kubelet.drive.checkpoint = None
        await world.kubelet.start()
        await asyncio.sleep(gap)
        await die("c0")
        await asyncio.sleep(20)

    machine(play, seed)
    return wrong


tries = [(seed, gap) for seed in range(30) for gap in GAPS]
bad = {one: wrong for one in tries if (wrong := wrong_answers(*one))}
for (seed, gap), wrong in list(bad.items())[:1]:
    print(f"seed {seed}, gap {gap}: {'; '.join(wrong)}")
print(f"{len(bad)} of {len(tries)}")
verdict(right=not bad, wrong="another container's share, without any failure of PodResources")
