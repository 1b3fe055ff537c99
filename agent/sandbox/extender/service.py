"""The whole extender: the scheduler model with watches as input and an HTTP server."""

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import NoReturn

import structlog

from agent.core.errors import MalformedText
from agent.core.ports import Clock
from agent.host.kube.session import KubeSession
from agent.host.kube.watch import WatchTimes
from agent.sandbox.api_errors import Json, StatusError
from agent.sandbox.extender import messages
from agent.sandbox.extender.cluster import KubeCluster
from agent.sandbox.extender.follow import Audience, Follower
from agent.sandbox.extender.server import REVIEW_LIMIT, ExtenderPath, ExtenderServer
from agent.sandbox.extender.view import QuotaView, SeenNodes, SeenPods
from agent.sandbox.scheduler.bind import BindError
from agent.sandbox.scheduler.filter import Filtered
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.verbs import REGISTER_INTERVAL, HamiVerbs

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ExtenderOptions:
    """The options of an extender; `interval`: seconds between two ingestions of all nodes."""

    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    interval: float = REGISTER_INTERVAL
    pace: WatchTimes = field(default_factory=WatchTimes)


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the extender listens. `port` 0: a free port. `tls` None: plain HTTP."""

    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None


class Extender:
    """Answers filter, bind and admission for one cluster. `run` keeps its view up to date.

    As in HAMi's scheduler, no verb has a deadline. Each runs to its end, even if kube-scheduler,
    which waits 30 s, has given up.
    """

    def __init__(
        self, session: KubeSession, clock: Clock, rng: random.Random, options: ExtenderOptions
    ) -> None:
        self._options = options
        cluster, settings = KubeCluster(session), options.settings
        self._hami = HamiVerbs(cluster, clock, rng, settings, eager=True)
        self._nodes = SeenNodes(self._hami)
        audiences: tuple[tuple[str, Audience], ...] = (
            ("nodes", self._nodes),
            ("pods", SeenPods(self._hami)),
            ("resourcequotas", QuotaView(self._hami.quotas)),
        )
        self._followers = tuple(
            Follower(session, resource, audience, rng, options.pace, self._hami.queue)
            for resource, audience in audiences
        )

    def is_listed(self) -> bool:
        """Whether all nodes, pods and quotas were listed once."""
        return all(follower.listed.is_set() for follower in self._followers)

    async def run(self) -> NoReturn:
        """Follow nodes and pods, and send Events, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hami.run())
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
            return messages.simulation_result(self._hami.simulate(args.pod, nodes), nodes)
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
            await self._hami.bind(args.podnamespace, args.podname, args.poduid, args.node)
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
            admission = self._hami.review(pod)
        log.info(
            "scheduler.pod_reviewed",
            uid=review.request.uid,
            allowed=admission.is_allowed,
            changed=admission.pod != pod,
            why=admission.message,
        )
        return messages.review_answer(review, admission, pod)

    async def _filter(self, pod: Json, names: list[str]) -> Filtered:
        for follower in self._followers:
            await follower.listed.wait()
        try:
            return await self._hami.filter(pod, names)
        except StatusError as failure:
            return Filtered(error=str(failure))


@contextlib.asynccontextmanager
async def serving(extender: Extender, listen: Listen) -> AsyncIterator[str]:
    """Run the extender while the block runs; yields its address.

    Raises:
        OSError: the address cannot be bound.
    """
    doors = {
        "/filter": ExtenderPath(extender.filter),
        "/bind": ExtenderPath(extender.bind),
        "/webhook": ExtenderPath(extender.review, REVIEW_LIMIT),
    }
    server = ExtenderServer(doors, extender.is_listed)
    listening = server.listening(listen.host, listen.port, listen.tls)
    async with listening as address, asyncio.TaskGroup() as group:
        following = group.create_task(extender.run())
        try:
            yield address
        finally:
            following.cancel()
