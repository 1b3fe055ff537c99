"""One cluster for each worker of the tests beside the real peers, and a fresh agent for each test
that asks for one.

The workers (`-n`) run side by side, each with modules and a cluster of its own: most of a test is
waiting.
"""

import asyncio
import contextlib
import functools
import os
from collections import Counter
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
import pytest_asyncio

from tests.marking import on_real_time
from tests.peers.lab.agents import Agent
from tests.peers.lab.cluster import Cluster, kept, open_cluster
from tests.peers.lab.nodes import NodeUnderTest, ProbePlugin, RealNode, open_model_node
from tests.peers.lab.placing import MODEL, Programs, Release, release_of
from tests.peers.lab.running import asked_beyond_rights
from tests.peers.lab.servers import Server, model_server, real_server
from tests.peers.lab.table import Table
from tests.released import released

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "build" / "peers.md"
ARCHIVE = HERE.parents[1] / "build" / "image" / "small" / "hami-agent.oci.tar"
MEASURED: Final = pytest.StashKey[Table]()
STARTED: Final = 45.0
"""Seconds that a cluster may take until its Node is ready."""


def pytest_sessionstart() -> None:
    """A scheduler that cannot be used is told before there are workers."""
    release_of_scheduler()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Real time, and one event loop for all: the cluster outlives a test.

    What is claimed of a model and of the real program is tried on the real one with --peers, and on
    the model with all other tests; there the clock of tests/sandbox does what takes long.
    What cannot hold beside the scheduler that was named is left out, with its reason; beside our
    model of it nothing is.
    """
    release = release_of_scheduler()
    kept, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (kept if is_tried(item, real=config.getoption("--peers")) else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
    for item in items:
        for mark in item.iter_markers("from_release"):
            first, why = mark.args
            if release.number < first:
                item.add_marker(pytest.mark.skip(f"HAMi {release}: {why}"))
    on_real_time(items, HERE, 120, one_loop=True)
    # A worker that began a long module last would be at it when all others are done.
    longest = Counter[Path]()
    for item in items:
        if item.path.parent == HERE:
            (seconds,) = next(item.iter_markers("timeout")).args
            longest[item.path] = max(seconds, longest[item.path])
    items.sort(key=lambda item: -longest[item.path])


def is_tried(item: pytest.Item, *, real: bool) -> bool:
    """Whether a test is one of the real programs, or none of theirs and not long."""
    if item.path.parent != HERE or not (given := getattr(item, "callspec", None)):
        return True
    if "model" in (given.params.get("place"), given.params.get("server")):
        return not real and item.get_closest_marker("long") is None
    return real


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure come the last words of every program of the cluster."""
    report = yield
    used = getattr(item, "funcargs", {})
    site = used.get("site_of_module")
    if report.failed and site is not None:
        report.sections.append(("last words of the release", site.tail()))
    cluster = used.get("cluster") or getattr(used.get("node") or site, "cluster", None)
    if report.failed and isinstance(cluster, Cluster):
        # Once more at the end: of a long report often the end is all that is kept.
        words = f"{cluster.last_words()}\n{report.when}: {report.longreprtext[-2000:]}"
        report.sections.append(("last words", words))
    return report


def named(variable: str) -> Path | None:
    """What tests/peers/run has built, or who runs the tests has named."""
    text = os.environ.get(variable)  # noqa: TID251 -- as said
    return Path(text).absolute() if text else None


@functools.cache
def release_of_scheduler() -> Release:
    """Of which release the scheduler is that HAMI_PEERS_SCHEDULER names, or our model of it."""
    scheduler = named("HAMI_PEERS_SCHEDULER")
    if scheduler is None:
        return MODEL
    said = os.environ.get("HAMI_PEERS_SCHEDULER_RELEASE")  # noqa: TID251 -- by who runs the tests
    try:
        return release_of(scheduler, said)
    except (OSError, ValueError) as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def binaries() -> Path:
    """The folder of what tests/peers/run has built."""
    folder = named("HAMI_PEERS_BIN")
    if folder is None:
        pytest.fail("there are no programs to test beside: run make test-peers", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def programs(binaries: Path) -> Programs:
    """The same; HAMI_PEERS_SCHEDULER names a scheduler of HAMi's own."""
    return Programs(binaries, named("HAMI_PEERS_SCHEDULER"), release_of_scheduler())


def leave_out(reason: str) -> NoReturn:
    """Skip what cannot be tried on this machine; in CI nothing may be."""
    if os.environ.get("CI"):  # noqa: TID251 -- said by .ci/run
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def tools() -> Path:
    return named("HAMI_CHART_TOOLS") or leave_out("no helm: `tests/chart/build --lacks` says why")


@pytest.fixture(scope="session")
def archive() -> Path:
    """The image of the agent: of a release that was built, or what tests/peers/run has built."""
    archive = released("*.oci.tar") or ARCHIVE
    return archive if archive.exists() else leave_out("no image: see `deploy/image/build --lacks`")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands over what it measured."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["measured"] = session.config.stash.get(MEASURED, Table()).told()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker measured joins what the others did."""
    output = getattr(node, "workeroutput", {})
    node.config.stash.setdefault(MEASURED, Table()).take(output.get("measured", ()))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The table is shown and written at the end, also of a run without failures."""
    table = config.stash.get(MEASURED, Table())
    if table.told() and config.getoption("--peers"):
        long = config.getoption("markexpr") == "long"
        path = TABLE.with_stem("peers-long") if long else TABLE
        table.write(path)
        terminalreporter.section(f"measured, and in {path}")
        terminalreporter.write(table.text())


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> Table:
    return pytestconfig.stash.setdefault(MEASURED, Table())


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster_of_session(programs: Programs, table: Table) -> AsyncIterator[Cluster]:
    """The cluster that tests share; how long its start took is noted.

    Over all that they made the agent do: it asked for nothing but what is granted. Most of them run
    it as the node's own user, so a right that the account lacks would not show in them.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with kept(open_cluster(programs)) as opened:
        table.hold("cluster: start → Node ready", loop.time() - began, STARTED, far=3)
        yield opened
        assert set() == asked_beyond_rights(opened.plane.audit)


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(cluster_of_session: Cluster) -> AsyncIterator[Cluster]:
    """The shared cluster, with nothing on its node; left so, and with every part alive."""
    cluster = cluster_of_session
    yield cluster
    # The last one first, and each even if those before it fail: the next test needs them all.
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(cluster.forget_agent_state)
        stack.push_async_callback(cluster.remove_pods)
        stack.push_async_callback(cluster.revive)
        stack.push_async_callback(cluster.end_agents)
        stack.callback(cluster.thaw)


@pytest_asyncio.fixture(loop_scope="session")
async def agent(cluster: Cluster, table: Table) -> Agent:
    """An agent as the node's own user, which has registered its 80 slices."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    made = await cluster.start_agent()
    await cluster.until_allocatable(80, 30.0)
    table.add("agent started → 80 slices in PodResources", loop.time() - began, 1.0)
    await cluster.nodes.until(cluster.is_sharing, 30.0, "no slices on the Node")
    return made


@pytest.fixture(params=["model", "real"])
def place(request: pytest.FixtureRequest) -> Cluster | None:
    """Where a kubelet is asked: the model stands alone, the real one in the cluster."""
    return request.getfixturevalue("cluster") if request.param == "real" else None


@pytest_asyncio.fixture(loop_scope="session")
async def node(place: Cluster | None, tmp_path: Path) -> AsyncIterator[NodeUnderTest]:
    """A node without any plugin: the kubelet model's, and the same test again the real one's."""
    if place is not None:
        yield RealNode(place)
        return
    async with kept(open_model_node(tmp_path)) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def plugin(node: NodeUnderTest) -> AsyncIterator[ProbePlugin]:
    """A registered plugin on that node, whose four ids are healthy."""
    async with node.plugin() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["model", "real"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    """An API server without a cluster: the model, and every test again the real one."""
    opened = model_server()
    if request.param == "real":
        opened = real_server(request.getfixturevalue("binaries"))
    async with kept(opened) as made:
        yield made
