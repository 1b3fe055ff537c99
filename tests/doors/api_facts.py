"""The facts of a small node, and a server of the read API that shows them."""

import contextlib

import aiohttp
import msgspec

from agent.cluster import NodeView
from agent.ledger import JournalEntry, Ledger
from agent.model import SliceGroup, SliceList, slice_id
from agent.node.findings import Check
from agent.status import NodeStatus, SettingStatus
from agent.web.api import ReadApi, Readers
from agent.web.policy import ReaderPolicy
from agent.web.server import Listeners, WebServer
from agent.web.status import StatusFacts
from tests.builders import G1, NOON, a_gpu, a_row, a_share, a_shared_gpu, an_inventory

ENTRY = JournalEntry(NOON, "HA-2005", "there is no lock", namespace="ns", pod="late")


def facts(**parts) -> StatusFacts:
    shared = a_shared_gpu(gpu=a_gpu(uuid=G1, index=3))
    basis = StatusFacts(
        now=NOON,
        about=NodeStatus(name="node-1", version="1.2.3", started_at=NOON, split_count=10),
        checks=(Check("state", ok=True), Check("api", ok=False, text="down", required=False)),
        node=NodeView("node-1", "u", "1"),
        inventory=an_inventory(gpus=[shared]),
        slices=SliceList(1, (SliceGroup(G1, (slice_id(G1, 0), slice_id(G1, 1)), True, 0),)),
        ledger=Ledger((a_row(shares=(a_share(),)),)),
        newest=lambda _: None,
        history=lambda _: (),
        used=lambda _: None,
        past=lambda _: {},
        changes=(),
        refusals=(ENTRY,),
        journal_since=NOON,
        settings=lambda: (SettingStatus(key="web.port", value=9394, origin="default"),),
    )
    return msgspec.structs.replace(basis, **parts)


@contextlib.asynccontextmanager
async def reading(made, policy=ReaderPolicy.LOCAL):
    """A server whose facts are `made()`, and a client of its port."""
    server = WebServer(Listeners("127.0.0.1", 0), {}, api=ReadApi(made, Readers(policy)))
    async with (
        server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client,
    ):
        yield client
