"""What the agent of a history holds: the objects that can be reached from it, counted."""

import asyncio
import gc
import sys
import types
from collections import Counter
from collections.abc import Iterator

_ELSEWHERE = ("agent.sandbox.", "tests.")
_LOADED = (type, types.ModuleType, asyncio.AbstractEventLoop)


def live_objects(agent: object) -> Counter[str]:
    """Objects by type, without the models, the tests, the loop and what belongs to modules."""
    gc.collect()
    found: Counter[str] = Counter()
    left = [agent]
    seen = {id(agent), *(id(vars(module)) for module in list(sys.modules.values()))}
    while left:
        for one in _held_by(left.pop()):
            if id(one) not in seen:
                seen.add(id(one))
                left.append(one)
                found[type(one).__qualname__] += 1
    return found


def _held_by(one: object) -> Iterator[object]:
    for held in gc.get_referents(one):
        is_model = type(held).__module__.startswith(_ELSEWHERE)
        if not is_model and not isinstance(held, _LOADED):
            yield held
