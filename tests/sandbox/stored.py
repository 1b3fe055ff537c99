"""A store and the pods that its tests put into it."""

from agent.sandbox.api_errors import Json
from agent.sandbox.store import Change, ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock


def a_store(history: int = 100) -> ObjectStore:
    """An empty one, which remembers so many changes."""
    return ObjectStore(ManualClock(), Seeded(), history)


async def taken(store: ObjectStore, count: int, since: int | None, **fields: str) -> list[Change]:
    """So many changes of pods since that version, for this selection."""
    selector = {key.replace("_", "."): value for key, value in fields.items()}
    subscription = store.subscribe("pods", since, fields=selector)
    return [await anext(subscription) for _ in range(count)]


def a_pod(name: str = "p", node: str = "", grace: int | None = None) -> Json:
    """A pod, on `node` if one is named; `grace`: the seconds that it is given to end."""
    spec: Json = {"nodeName": node} if node else {}
    if grace is not None:
        spec["terminationGracePeriodSeconds"] = grace
    return {"metadata": {"name": name}, "spec": spec}
