"""The API server as the agent sees it: the store, behind watches that lag and an outage."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from agent.cluster import MUTEX_LOCK, NodeView, PodChange, PodList, PodUid, PodView
from agent.errors import ApiError, ApiForbidden, ApiGone, ApiInvalid, ApiNotFound
from agent.kube.objects import decode_node, decode_pod
from agent.ports import Clock
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.store import Change, GoneError, Json, NotFoundError, ObjectStore, Subscription
from tests.builders import NODE
from tests.machine.kubelet import RESOURCE

SILENCE = 150.0
"""Seconds after which a watch that shows nothing is taken for dead, by the agent's own measure."""

_TRIP = (0.002, 0.03)
"""Seconds for one request."""

_FRAME = (0.001, 0.012)
"""Seconds from a write to its frame of a watch that does not lag."""

_QUICK = 0.7
"""The share of a late watch's frames that are not late themselves."""

REMEMBERED = 1000
"""Versions of which the time of the write is kept, as many as the store keeps frames."""


class Store(ObjectStore):
    """The cluster's objects. `told` hears of every write: resource, before, after.

    `written`: when each of the latest versions was written, on the loop's clock.
    """

    def __init__(self, clock: Clock, chance: random.Random) -> None:
        super().__init__(clock, chance)
        self.told: Callable[[str, Json | None, Json | None], None] = lambda *_: None
        self.written: dict[int, float] = {}
        self._news = asyncio.Event()

    def _write(self, resource: str, key: tuple[str, str], fresh: Json) -> Json:
        before = self._objects[resource].get(key)
        written = super()._write(resource, key, fresh)
        self._tell(resource, before, written)
        return written

    def _remove(self, resource: str, key: tuple[str, str]) -> Json:
        gone = super()._remove(resource, key)
        self._tell(resource, gone, None)
        return gone

    def stir(self) -> None:
        """Whoever waits for news looks again."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def until_news(self, within: float) -> None:
        """Return after the next write or stir, or after so many seconds."""
        try:
            async with asyncio.timeout(within):
                await self._news.wait()
        except TimeoutError:
            return

    def _tell(self, resource: str, before: Json | None, after: Json | None) -> None:
        self.written[self.version] = asyncio.get_running_loop().time()
        self.written.pop(self.version - REMEMBERED, None)
        self.told(resource, before, after)
        self.stir()


class ApiGate:
    """One watch's pace: open, or held back but for so many frames.

    It shows every write so many seconds late.
    """

    def __init__(self, store: Store, late: float = 0.0) -> None:
        self._store = store
        self._late = late
        self._is_held = False
        self._frames = 0

    def hold(self, frames: int) -> None:
        """So many more frames arrive, and then none."""
        self._is_held, self._frames = True, frames
        self._store.stir()

    def open(self) -> None:
        """All arrives."""
        self._is_held = False
        self._store.stir()

    def take(self, follower: Subscription) -> Change | None:
        """The next frame, if it may pass."""
        if self._is_held and not self._frames:
            return None
        change = follower.take()
        self._frames -= self._is_held and change is not None
        return change

    def seconds_left(self, change: Change, chance: random.Random) -> float:
        """How long the frame that was just taken is still on its way."""
        now = asyncio.get_running_loop().time()
        written = self._store.written.get(change.resource_version, now)
        return max(0.0, written + self._late - now) + chance.uniform(*_FRAME)

    @property
    def is_held(self) -> bool:
        """Whether frames are kept back now."""
        return self._is_held and not self._frames


class LateGate(ApiGate):
    """Frames arrive in order, each at most so many seconds after its write.

    Most are quick; behind a late one those that follow it wait.
    """

    def seconds_left(self, change: Change, chance: random.Random) -> float:
        """Until its own moment has come; those before it have arrived."""
        now = asyncio.get_running_loop().time()
        written = self._store.written.get(change.resource_version, now)
        is_quick = chance.random() < _QUICK
        late = chance.uniform(*_FRAME) if is_quick else chance.uniform(0.0, self._late)
        return max(0.0, written + late - now)


class ApiFaults:
    """What is wrong between the agent and the API server; it outlives the agent.

    `hides`: to a node's own identity, which hears 403 of a pod that is not there.
    """

    def __init__(self, store: Store, pods: ApiGate, node: ApiGate) -> None:
        self._store = store
        self.is_down = False
        self.is_alone = False
        """Whether the agent alone cannot reach the API server: for all others it is there."""
        self.list_fails = False
        self.hides = False
        self.trip = 0.0
        """Seconds that each request takes longer."""
        self.pods = pods
        self.node = node
        self.shown_locks: set[str] = set()
        """All that a watch of the Node has shown to the agent."""

    def change(self, *, is_down: bool, list_fails: bool, is_alone: bool = False) -> None:
        """An outage, or a server that answers all but a LIST, begins or ends."""
        self.is_down, self.list_fails, self.is_alone = is_down, list_fails, is_alone
        self._store.stir()

    def catch_up(self) -> None:
        """Both watches show all at once."""
        self.pods.open()
        self.node.open()

    def clear(self) -> None:
        """All is well again."""
        self.change(is_down=False, list_fails=False)
        self.catch_up()


class AgentApi:
    """NodeApi and PodApi of one life of the agent. `step`: one of its awaits, maybe its last.

    `node`: its Node. `writes` counts what was asked for, refused or not.
    """

    def __init__(
        self,
        store: Store,
        faults: ApiFaults,
        chance: random.Random,
        step: Callable[[], Awaitable[None]],
        node: str = NODE,
    ) -> None:
        self._node = node
        self._store = store
        self._faults = faults
        self._chance = chance
        self._step = step
        self.writes = 0
        self.released: Callable[[str], None] = lambda _: None
        self.annotated: Callable[[PodUid, Mapping[str, str | None]], None] = lambda *_: None

    async def watch_node(self) -> AsyncIterator[NodeView | None]:
        await self._request()
        follower = self._store.subscribe("nodes", None, fields={"metadata.name": self._node})
        async for change in self._follow(follower, self._faults.node):
            deleted = change.type == "DELETED"
            node = None if deleted else decode_node(change.object)
            self._faults.shown_locks.add(node.annotations.get(MUTEX_LOCK, "") if node else "")
            yield node

    async def get_node(self) -> NodeView | None:
        await self._request()
        node = self._stored("nodes", "", self._node)
        await self._step()
        return None if node is None else decode_node(node)

    async def annotate_node(self, annotations: Mapping[str, str | None]) -> NodeView:
        self.writes += 1
        await self._request()
        changes = {"metadata": {"annotations": dict(annotations)}}
        node = self._store.update("nodes", "", self._node, lambda held: merge_patch(held, changes))
        await self._step()
        return decode_node(node)

    async def release_lock(self, key: str, value: str) -> None:
        self.writes += 1
        await self._request()
        node = self._store.get("nodes", "", self._node)
        if (node["metadata"].get("annotations") or {}).get(key) != value:
            raise ApiInvalid("the test failed", status=422)
        if key == MUTEX_LOCK:
            self.released(value)
        changes = {"metadata": {"annotations": {key: None}}}
        self._store.update("nodes", "", self._node, lambda held: merge_patch(held, changes))
        await self._step()

    async def list_pods(self) -> PodList:
        await self._request()
        if self._faults.list_fails:
            raise ApiError("the LIST failed", status=500)
        found = self._store.select("pods", fields={"spec.nodeName": self._node})
        version = str(self._store.version)
        pods = PodList(tuple(decode_pod(pod, RESOURCE) for pod in found), version)
        await self._step()
        return pods

    async def get_pod(self, namespace: str, name: str) -> PodView | None:
        await self._request()
        pod = self._stored("pods", namespace, name)
        await self._step()
        is_here = pod is not None and pod["spec"].get("nodeName") == self._node
        if self._faults.hides and not is_here:
            raise ApiForbidden("no relationship found between node and this object")
        return decode_pod(pod, RESOURCE) if pod is not None and is_here else None

    async def watch_pods(self, resource_version: str) -> AsyncIterator[PodChange]:
        await self._request()
        try:
            follower = self._store.subscribe(
                "pods", int(resource_version), fields={"spec.nodeName": self._node}
            )
        except GoneError as error:
            raise ApiGone(str(error), status=410) from error
        yield PodChange(resource_version)
        async for change in self._follow(follower, self._faults.pods):
            pod = decode_pod(change.object, RESOURCE)
            deleted = change.type == "DELETED"
            yield PodChange(str(change.resource_version), pod, deleted=deleted)

    async def annotate_pod(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        self.writes += 1
        await self._request()
        try:
            held = self._store.get("pods", namespace, name)
        except NotFoundError as error:
            raise ApiNotFound(str(error), status=404) from error
        if held["metadata"]["uid"] != uid:
            raise ApiInvalid("metadata.uid: field is immutable", status=422)
        self.annotated(uid, annotations)
        changes = {"metadata": {"annotations": dict(annotations)}}
        self._store.update("pods", namespace, name, lambda pod: merge_patch(pod, changes))
        await self._step()

    async def _request(self) -> None:
        await self._step()
        await asyncio.sleep(self._chance.uniform(*_TRIP) + self._faults.trip)
        self._require_server()

    def _stored(self, resource: str, namespace: str, name: str) -> Json | None:
        try:
            return self._store.get(resource, namespace, name)
        except NotFoundError:
            return None

    def _require_server(self) -> None:
        if self._faults.is_down:
            raise ApiError("connection refused")

    async def _follow(self, follower: Subscription, gate: ApiGate) -> AsyncIterator[Change]:
        """The frames; a watch that was held back for too long breaks."""
        loop = asyncio.get_running_loop()
        silent_since: float | None = None
        while True:
            self._require_server()
            change = gate.take(follower)
            if change is not None:
                silent_since = None
                await asyncio.sleep(gate.seconds_left(change, self._chance))
                self._require_server()
                yield change
                continue
            silent_since = (silent_since or loop.time()) if gate.is_held else None
            if silent_since is not None and loop.time() - silent_since >= SILENCE:
                gate.open()
                raise ApiError("the watch was silent for too long")
            await self._store.until_news(SILENCE)
