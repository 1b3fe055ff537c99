"""Stories of a cluster in which nothing fails: drawn from a seed, kept as data, cut to the bone.

A story says how quick everybody is and what owners of pods do at which second. The same story is
always played the same way, so one in which something went wrong can be told again with fewer deeds.
"""

import dataclasses
import random
from collections.abc import Callable

from agent.allocate.candidates import UnlockedPods
from tests.fakes.chance import Seeded
from tests.machine.pods import Box, Shape


@dataclasses.dataclass(frozen=True)
class StoryPace:
    """How quick everybody is.

    `pods_late`, `node_late`: most seconds that a frame of the agent's watches takes. `is_slow`:
    HAMi's scheduler with its default client, 5 requests a second. `spread`: it takes the emptiest
    GPU first. `is_old`: a kubelet before 1.34. `hides`: the agent has a node's own identity, which
    is told 403 of a pod that is gone. `crowd`: how often others ask PodResources, in seconds.
    """

    pods_late: float = 0.0
    node_late: float = 0.0
    is_slow: bool = True
    spread: bool = False
    is_old: bool = False
    hides: bool = False
    unlocked: UnlockedPods = UnlockedPods.SCHEDULED
    crowd: float = 0.0


@dataclasses.dataclass(frozen=True)
class Burst:
    """So many pods at once, each with a name of its own; `prefix` + number, or a generated one."""

    at: float
    count: int
    shape: Shape
    prefix: str
    is_generated: bool = False


@dataclasses.dataclass(frozen=True)
class Job:
    """Short pods, so many in all and so many at a time, removed some seconds after the last."""

    at: float
    name: str
    shape: Shape
    completions: int
    parallelism: int


@dataclasses.dataclass(frozen=True)
class StatefulSet:
    """Pods whose names return: the n-th pod of a name has the n-th shape, round and round."""

    at: float
    name: str
    shapes: tuple[Shape, ...]
    replicas: int
    is_parallel: bool = False


@dataclasses.dataclass(frozen=True)
class Deployment:
    """Pods with generated names; a roll replaces them one by one by those of the next shape."""

    at: float
    name: str
    shapes: tuple[Shape, ...]
    replicas: int


@dataclasses.dataclass(frozen=True)
class Roll:
    """All of the deployments roll; all pods of the stateful sets are replaced, last one first."""

    at: float


@dataclasses.dataclass(frozen=True)
class Delete:
    """The pod at that place among those that are there is deleted, and `count` - 1 after it."""

    at: float
    place: int
    grace: int
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Crash:
    """The container at that place among those that run ends, as often, a second apart."""

    at: float
    place: int
    times: int


@dataclasses.dataclass(frozen=True)
class Swap:
    """A pod is deleted by force so many seconds after its binding, and made again with `then`."""

    at: float
    name: str
    shape: Shape
    then: Shape
    after: float
    again_after: float
    times: int = 1


Deed = Burst | Job | StatefulSet | Deployment | Roll | Delete | Crash | Swap


@dataclasses.dataclass(frozen=True)
class MachineStory:
    """One history. `seed` is also that of everything that is left to chance while it is played."""

    seed: int
    pace: StoryPace
    deeds: tuple[Deed, ...]


OLD_KUBELETS = 0.1
UNLOCKED = 0.15
SECONDS = 20.0
"""Within which all deeds begin."""

_APPS = (
    Shape((Box(mib=2000),)),
    Shape((Box(mib=2000),)),
    Shape((Box(mib=1000),)),
    Shape((Box(mib=3000, cores=0),)),
    Shape((Box(mib=4000),)),
    Shape((Box(mib=9000),)),
    Shape((Box(mib=2000), Box(mib=1000, cores=0))),
    Shape((Box(mib=1000), Box(count=0), Box(mib=2000))),
    Shape((Box(mib=1000, cores=10), Box(mib=2000, cores=10), Box(mib=500, cores=10))),
    Shape((Box(count=2, mib=2000),)),
    Shape((Box(count=2, mib=1000), Box(mib=2000))),
    Shape((Box("init", mib=9000), Box(mib=2000))),
    Shape((Box("init", mib=2000), Box("init", count=2, mib=3000), Box(mib=2000))),
    Shape((Box("init", count=0), Box(mib=3000))),
    Shape((Box("sidecar", mib=1000), Box(mib=2000))),
    Shape((Box("sidecar", count=0), Box(mib=2000), Box(mib=1000))),
    Shape((Box("init", mib=4000), Box("sidecar", mib=1000), Box(mib=2000), Box(mib=1000))),
    Shape((Box("init", count=2, mib=1000), Box(count=2, mib=1000))),
)
_LOCKLESS = Shape((Box("init", mib=3000), Box(count=0)))
"""HAMi takes no lock for it: its only request is an init container's."""


def a_story(seed: int) -> MachineStory:
    """The story of that number."""
    chance = Seeded(seed)
    pace = _a_pace(chance)
    shapes = [chance.choice(_APPS) for _ in range(4)]
    if pace.unlocked is UnlockedPods.UNIQUE or seed % 3 == 0:
        shapes[0] = _LOCKLESS
    deeds = tuple(_a_deed(number, chance, shapes) for number in range(chance.randint(2, 7)))
    return MachineStory(seed, pace, tuple(sorted(deeds, key=lambda deed: deed.at)))


def _a_pace(chance: random.Random) -> StoryPace:
    is_unlocked = chance.random() < UNLOCKED
    return StoryPace(
        pods_late=chance.choice((0.01, 0.3, 1.0, 2.0, 2.0)),
        node_late=chance.choice((0.01, 0.3, 1.0, 2.0, 2.0)),
        is_slow=chance.random() < 0.7,
        spread=chance.random() < 0.5,
        is_old=chance.random() < OLD_KUBELETS,
        hides=chance.random() < 0.3,
        unlocked=UnlockedPods.UNIQUE if is_unlocked else UnlockedPods.SCHEDULED,
        crowd=chance.choice((0.0, 0.0, 0.0, 0.5)),
    )


Draw = Callable[[int, float, random.Random, list[Shape]], Deed]


def _a_deed(number: int, chance: random.Random, shapes: list[Shape]) -> Deed:
    at = round(chance.uniform(0.0, SECONDS), 2)
    draw = chance.choices([kind for kind, _ in _KINDS], weights=[weight for _, weight in _KINDS])
    return draw[0](number, at, chance, shapes)


def _a_job(number: int, at: float, chance: random.Random, shapes: list[Shape]) -> Deed:
    seconds = chance.choice((1, 2, 5))
    policy = chance.choice(("Never", "OnFailure"))
    short = dataclasses.replace(chance.choice(shapes), seconds=seconds, restarts=policy)
    return Job(at, f"job{number}", short, chance.choice((4, 8, 12)), chance.choice((2, 4, 4)))


def _a_stateful_set(number: int, at: float, chance: random.Random, shapes: list[Shape]) -> Deed:
    several = tuple(chance.choices(shapes, k=3))
    is_parallel = chance.random() < 0.5
    return StatefulSet(at, f"web{number}", several, chance.randint(1, 4), is_parallel)


def _a_deployment(number: int, at: float, chance: random.Random, shapes: list[Shape]) -> Deed:
    return Deployment(at, f"api{number}", tuple(chance.choices(shapes, k=2)), 3)


def _a_roll(number: int, at: float, chance: random.Random, shapes: list[Shape]) -> Deed:
    return Roll(at)


def _a_deletion(number: int, at: float, chance: random.Random, shapes: list[Shape]) -> Deed:
    grace = chance.choice((0, 0, 1, 30))
    return Delete(at, chance.randint(0, 40), grace, chance.choice((1, 1, 3)))


def _a_crash(number: int, at: float, chance: random.Random, shapes: list[Shape]) -> Deed:
    return Crash(at, chance.randint(0, 40), chance.choice((1, 3)))


def _a_swap(number: int, at: float, chance: random.Random, shapes: list[Shape]) -> Deed:
    return Swap(
        at,
        f"one{number}",
        chance.choice(shapes),
        chance.choice(shapes),
        after=chance.choice((0.0, 0.0, 0.005, 0.02, 0.1, 1.0)),
        again_after=chance.choice((0.0, 0.0, 0.005, 0.1)),
        times=chance.choice((1, 1, 3)),
    )


def _a_burst(number: int, at: float, chance: random.Random, shapes: list[Shape]) -> Deed:
    """At times as large as they come, of the smallest pods then: all are to find room."""
    count = chance.choice((3, 8, 8, 30))
    shape = chance.choice(shapes) if count <= 8 else Shape((Box(mib=1000, cores=5),))
    shape = dataclasses.replace(shape, seconds=chance.choice((None, 3, 8)))
    return Burst(at, count, shape, f"b{number}", chance.random() < 0.5)


_KINDS: tuple[tuple[Draw, int], ...] = (
    (_a_burst, 3),
    (_a_job, 3),
    (_a_stateful_set, 4),
    (_a_deployment, 2),
    (_a_roll, 2),
    (_a_deletion, 4),
    (_a_crash, 2),
    (_a_swap, 4),
)
