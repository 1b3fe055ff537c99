"""A kubelet loses its checkpoint while PodResources fails, and two containers die.

The kubelet asks for one container and is answered with another's directory, GPUs and limits. Right:
the container's own share, or a refusal. Arguments are other seeds.
"""

import asyncio
import random
import sys

from tests.cases.box import answers_of_another, machine, verdict
from tests.machine.pods import Box, Shape

SEEDS = [int(word) for word in sys.argv[1:]] or range(60, 84)
"""72 was the first that was found."""


async def live(world, chance):
    """Pods come, the kubelet and the agent are killed, containers end, PodResources fails."""
    for number in range(chance.randint(1, 3)):
        count = chance.choice((1, 2, 2, 3))
        boxes = tuple(Box(mib=chance.choice((500, 900, 1300)), cores=0) for _ in range(count))
        if chance.random() < 0.3:
            boxes = (Box("sidecar", mib=300, cores=0), *boxes)
        await world.run_pod(f"p{number}", Shape(boxes))
    await asyncio.sleep(chance.choice((0.5, 3, 40)))
    for number in range(chance.randint(1, 3)):
        for act in chance.sample(("lose", "silent", "end", "kill"), 4):
            if act == "lose" and chance.random() < 0.8:
                await world.restart_kubelet(lose=True)
            if act == "silent" and chance.random() < 0.8:
                world.host.trouble.silent += chance.randint(1, 8)
            if act == "end" and (running := world.running()):
                count = chance.choice((1, 2, 3, len(running)))
                await world.end_containers(chance.randrange(len(running)), count)
            if act == "kill" and chance.random() < 0.4:
                world.kill_agent_at(chance.randint(0, 30), 0.3)
            await asyncio.sleep(chance.choice((0, 0, 0.01, 0.1, 0.5, 2)))
        if chance.random() < 0.3:
            shape = Shape((Box(mib=500, cores=0), Box(mib=900, cores=0)))
            world.spawn(world.scheduler.schedule(world.create(f"n{number}", shape)))
        await asyncio.sleep(chance.choice((0.2, 2, 15)))
    await asyncio.sleep(60)


def wrong_answers(seed: int) -> list[str]:
    wrong: list[str] = []

    async def play(world):
        answers_of_another(world, wrong)
        await live(world, random.Random(seed))

    machine(play, seed)
    return wrong


bad = {seed: wrong for seed in SEEDS if (wrong := wrong_answers(seed))}
for seed, wrong in bad.items():
    print(f"history {seed}: {'; '.join(wrong)}")
print(f"{len(bad)} of {len(SEEDS)} histories")
verdict(
    right=not bad,
    wrong="a container runs with another one's share; without the kubelet's word the agent guesses",
)
