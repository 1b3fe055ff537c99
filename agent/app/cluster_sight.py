"""Asks the API server what `doctor` checks beside a running agent."""

from collections.abc import Mapping, Sequence

import msgspec

from agent.app.preflight import agent_connection, ask_cluster, failure_of, open_session
from agent.core.errors import ApiError, ApiNotFound, SettingsError
from agent.core.node.api_rights import UNNEEDED, Right
from agent.core.node.config_entries import ASKED, NamedNode
from agent.core.node.preflight import ClusterAnswer
from agent.core.ports import Clock
from agent.host.kube.review import KubeReview
from agent.host.kube.sight import KubeSight, NodeSight
from agent.settings.sections import Settings


class ClusterSight(msgspec.Struct, frozen=True):
    """The API server's answers. `node` None: it was not shown, and `answer` says why.

    - `excess`: granted rights that the agent does not need; None: not asked.
    - `names`: whether the Nodes that the settings name exist.
    """

    answer: ClusterAnswer
    node: NodeSight | None = None
    excess: tuple[Right, ...] | None = None
    names: Mapping[str, NamedNode] = msgspec.field(default_factory=dict)


async def see_cluster(
    settings: Settings,
    environ: Mapping[str, str],
    clock: Clock,
    names: Sequence[str],
    *,
    reader: bool,
) -> ClusterSight:
    """Ask all questions in one session. `names`: Nodes that the settings name, this one not."""
    connection, server = agent_connection(settings, environ)
    unasked = dict.fromkeys(names, NamedNode.UNSEEN)
    try:
        async with open_session(connection) as session:
            answer = await ask_cluster(session, settings, server, reader=reader)
            review = KubeReview(session, settings.node)
            excess = tuple([right for right in UNNEEDED if await review.granted(right)])
            unread = any(right.words == "get nodes" for right in answer.denied)
            if answer.found is False or unread:
                return ClusterSight(answer, excess=excess, names=unasked)
            sight = KubeSight(session, clock)
            try:
                node = await sight.look(settings.node, settings.sharing.resource)
            except ApiNotFound:
                answer = msgspec.structs.replace(answer, found=False)
                return ClusterSight(answer, excess=excess, names=unasked)
            annotations = node.traces.annotations
            answer = msgspec.structs.replace(
                answer, found=True, labels=node.labels, annotations=annotations
            )
            asked = {name: await sight.named(name) for name in names[:ASKED]}
            return ClusterSight(answer, node, excess, unasked | asked)
    except (ApiError, SettingsError) as error:
        failure, remedy = failure_of(error)
        answer = ClusterAnswer(server, failure=failure, remedy=remedy)
        return ClusterSight(answer, names=unasked)
