"""The extender as a whole: the scheduler model, fed by watches, asked over HTTP."""

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final, NoReturn

import structlog

from agent.core.errors import MalformedText
from agent.core.ports import Clock
from agent.host.kube.session import KubeSession
from agent.host.kube.watch import Pace
from agent.sandbox.api_errors import Json, StatusError
from agent.sandbox.extender import messages
from agent.sandbox.extender.cluster import KubeCluster
from agent.sandbox.extender.events import EventQueue
from agent.sandbox.extender.follow import Follower
from agent.sandbox.extender.server import REVIEW_LIMIT, Door, ExtenderServer
from agent.sandbox.extender.turns import Turns
from agent.sandbox.extender.view import Nodes, Pods
from agent.sandbox.scheduler.bind import BindError
from agent.sandbox.scheduler.events import EventRecorder
from agent.sandbox.scheduler.filter import Filtered
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.verbs import REGISTER_INTERVAL, HamiVerbs
from agent.sandbox.scheduler.webhook import review_pod

log = structlog.get_logger(__name__)
ANSWER_WITHIN: Final = 25.0
"""kube-scheduler gives a verb up after 30 s and tries again."""
_WORK: Final = 0.8
"""The part of that time after which a bind goes no further; the rest is for rolling it back."""


@dataclass(frozen=True, slots=True)
class ExtenderOptions:
    """How an extender works; `interval` in seconds between two looks at all nodes.

    `answer_within`: seconds after which filter or bind is answered, done or not.
    """

    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    interval: float = REGISTER_INTERVAL
    answer_within: float = ANSWER_WITHIN
    pace: Pace = field(default_factory=Pace)


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the extender listens; `port` 0 is a free one, no `tls` is plain HTTP."""

    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None


class Extender:
    """Answers filter, bind and admission for one cluster; `run` keeps its view of it."""

    def __init__(
        self, session: KubeSession, clock: Clock, rng: random.Random, options: ExtenderOptions
    ) -> None:
        self._options = options
        cluster, settings = KubeCluster(session), options.settings
        self._events = EventQueue(EventRecorder(cluster, clock, settings.scheduler_name))
        self._hami = HamiVerbs(cluster, clock, rng, settings, eager=True, events=self._events)
        self._binds = Turns()
        self._nodes = Nodes(self._hami)
        self._followers = (
            Follower(session, "nodes", self._nodes, rng, options.pace),
            Follower(session, "pods", Pods(self._hami), rng, options.pace),
        )

    def is_listed(self) -> bool:
        """Whether all nodes and pods were seen once."""
        return all(follower.listed.is_set() for follower in self._followers)

    async def run(self) -> NoReturn:
        """Follow nodes and pods, and send Events, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._events.run())
            for follower in self._followers:
                group.create_task(follower.run())
            while True:
                await asyncio.sleep(self._options.interval)
                await self._hami.ingest(self._nodes.all())

    async def filter(self, body: bytes) -> Json:
        """Answer one ExtenderArgs. Raises MalformedText."""
        args = messages.read_filter(body)
        if args.pod is None:
            return messages.filter_result(Filtered(error="extender args missing pod"))
        if args.nodes is not None:
            nodes = args.nodes["items"]
            return messages.filter_result(self._hami.simulate(args.pod, nodes), nodes)
        filtered = await self._filter(args.pod, args.nodenames or [])
        metadata = args.pod["metadata"]
        log.info(
            "scheduler.pod_filtered",
            namespace=metadata["namespace"],
            pod=metadata["name"],
            nodes=list(filtered.nodes),
            failed=dict(filtered.failed),
            err=filtered.error,
        )
        return messages.filter_result(filtered)

    async def bind(self, body: bytes) -> Json:
        """Answer one ExtenderBindingArgs. Raises MalformedText."""
        args = messages.read_bind(body)
        said = {"namespace": args.podnamespace, "pod": args.podname, "node": args.node}
        try:
            await self._bind(args)
        except BindError as failure:
            log.info("scheduler.bind_failed", **said, reason=str(failure))
            return messages.bind_result(str(failure))
        log.info("scheduler.pod_bound", **said)
        return messages.bind_result()

    async def review(self, body: bytes) -> Json:
        """Answer one AdmissionReview. Raises MalformedText."""
        review = messages.read_review(body)
        try:
            pod = messages.new_pod(review.request)
        except MalformedText as error:
            pod = {}
            admission = messages.undecodable(pod, error)
        else:
            admission = review_pod(pod, self._hami.settings)
        log.info(
            "scheduler.pod_reviewed",
            uid=review.request.uid,
            allowed=admission.is_allowed,
            changed=admission.pod != pod,
            why=admission.message,
        )
        return messages.review_answer(review, admission, pod)

    async def _filter(self, pod: Json, names: list[str]) -> Filtered:
        try:
            async with asyncio.timeout(self._options.answer_within):
                for follower in self._followers:
                    await follower.listed.wait()
                return await self._hami.filter(pod, names)
        except StatusError as failure:
            return Filtered(error=str(failure))
        except TimeoutError:
            if self.is_listed():
                return Filtered(error=f"the pod could not be written {self._in_time()}")
            return Filtered(error="nodes and pods could not be listed yet")

    async def _bind(self, args: messages.BindArgs) -> None:
        """Bind, alone for this pod: a call that was repeated finds what the first one did.

        Raises:
            BindError: the pod was not bound, or not in time.
        """
        within = self._options.answer_within
        until = asyncio.get_running_loop().time() + within * _WORK
        pod = (args.podnamespace, args.podname, args.poduid)
        try:
            async with asyncio.timeout(within), self._binds.of(args.poduid):
                await self._hami.bind(*pod, args.node, until=until)
        except TimeoutError as late:
            raise BindError(f"the pod could not be bound {self._in_time()}") from late

    def _in_time(self) -> str:
        return f"within {self._options.answer_within:g} s"


@contextlib.asynccontextmanager
async def serving(extender: Extender, listen: Listen) -> AsyncIterator[str]:
    """The address of an extender that follows its cluster and answers while the block runs.

    Raises:
        OSError: the address cannot be had.
    """
    doors = {
        "/filter": Door(extender.filter),
        "/bind": Door(extender.bind),
        "/webhook": Door(extender.review, REVIEW_LIMIT),
    }
    server = ExtenderServer(doors, extender.is_listed)
    listening = server.listening(listen.host, listen.port, listen.tls)
    async with listening as address, asyncio.TaskGroup() as group:
        following = group.create_task(extender.run())
        try:
            yield address
        finally:
            following.cancel()
