"""What the page says: content, escaping, and its largest size."""

import msgspec
import pytest

from agent.codec.status_document import (
    AllocationStatus,
    CheckStatus,
    GpuStatus,
    LockStatus,
    NodeStatus,
    SettingStatus,
    ShareStatus,
    StatusDocument,
)
from agent.core.cluster.annotations import MUTEX_LOCK
from agent.core.cluster.pods import NodeView, Role
from agent.core.node.readiness import Check
from agent.core.state.ledger import Ledger
from agent.web.page.document import LARGEST, page_html
from agent.web.status import status_of
from tests.builders import NOON, a_row, a_share, a_uuid
from tests.doors.html_tree import HtmlTree
from tests.doors.page_facts import busy

EVIL = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></title></script><b>x</b>",
    "&lt;b&gt;<!--",
    "two\x00\x1b[2J\r\nlines\u202ehidden\ud800",
)


LONG = '"' * 240
ROLES = (("load", Role.INIT), ("main", Role.APP))


def page(**changes):
    return html_of(busy(**changes))


def html_of(facts):
    return page_html(status_of(facts), facts.settings(), facts.now)


def bytes_of(text):
    return len(text.encode())


def test_without_any_script_everything_is_there():
    text = HtmlTree(page(gpus=4, each=2)).text

    for words in (
        "gpu-a07 ready",
        "0.3.0, up 3 d 4 h",
        "held by llm/llama-9 for 3 s",
        "10 slices of nvidia.com/gpu per GPU, memory x1.5, profile h100-pool",
        "degraded gpu_health: GPU 1 is bad: XID 79",
        "GPU 1 bad not offered",
        "14.0 / 119.5 GiB, 5 % cores",
        "For 4 min: XID 79: the GPU fell off the bus; needed: a reboot of the node",
        "To do: reboot the node. Runbook: H-079.",
        "ok cordoned",
        "To do: nothing, it clears by itself. Runbook: H-094.",
        "research/train-resnet-011 main",
        "9 min ago HA-2004 research/probe-0/main: the node lock names",
        "4 min ago GpuUnhealthy GPU 1 is bad",
        "ok state, inventory, server",
        "sharing.memoryScaling 1.5 /etc/hami-agent/config.yaml:3:5",
    ):
        assert words in text, words


def test_what_needs_the_script_is_hidden_until_it_runs():
    tree = HtmlTree(page())

    assert [{"id": "filtering", "hidden": None}] == [
        found for _, found in tree.elements if "hidden" in found
    ]
    assert "Not live: reload for news," in tree.text


def named(text):
    """A page with that text in every place where the cluster's text stands."""
    facts = busy(gpus=2, each=2, name=lambda number: f"{text}{number}", text=text)
    settings = (SettingStatus(text, text, text), SettingStatus("a", [text], "default"))
    notes = {MUTEX_LOCK: f"not a lock {text}"}
    return html_of(
        msgspec.structs.replace(
            facts,
            about=msgspec.structs.replace(facts.about, name=text, resource=text, kubelet=text),
            checks=(Check("state", ok=False, text=text),),
            node=NodeView("n", "u", "1", annotations=notes),
            settings=lambda: settings,
            changes=facts.changes[:4],
            refusals=facts.refusals[:4],
        )
    )


@pytest.mark.parametrize("evil", EVIL)
def test_no_text_of_the_cluster_becomes_markup_or_hides_in_it(evil):
    found, harmless = named(evil), HtmlTree(named("harmless"))
    tree = HtmlTree(found)

    assert harmless.tags == tree.tags
    assert [list(given) for _, given in harmless.elements] == [
        list(given) for _, given in tree.elements
    ]
    assert [] == [char for char in found if not char.isprintable() and char != "\n"]


def test_an_ordinary_node_of_16_gpus_and_160_containers_is_shown_whole():
    found = page(gpus=16, each=10)
    tree = HtmlTree(found)

    assert bytes_of(found) <= LARGEST
    assert 16 == tree.tags.count("article")
    assert 160 == tree.text.count(" main ")
    assert "All of them" not in tree.text


def test_of_many_entries_a_small_node_shows_more_than_a_large_one():
    facts = busy(gpus=1, each=1, text=" and more words" * 10)
    large = msgspec.structs.replace(
        busy(gpus=16, each=14), changes=(*facts.changes,) * 9, refusals=(*facts.refusals,) * 9
    )
    small = msgspec.structs.replace(facts, changes=large.changes, refusals=large.refusals)
    shown = [HtmlTree(html_of(one)).tags.count("li") for one in (small, large)]

    assert shown[0] > 1.5 * shown[1] > 20


def test_whatever_there_is_the_page_is_not_larger_and_says_what_is_left_out():
    facts = busy(gpus=40, each=40, name=lambda number: f"{LONG}{number}", text=LONG * 2)
    checks = tuple(msgspec.structs.replace(one, ok=False, text="'" * 500) for one in facts.checks)
    many = tuple(SettingStatus(f"{'&' * 90}{n}", "&" * 200, "<" * 200) for n in range(200))
    facts = msgspec.structs.replace(facts, checks=checks, settings=lambda: many)

    found = html_of(facts)
    text = HtmlTree(found).text

    assert bytes_of(found) <= LARGEST
    for count, path in (
        (1600, "api/v1/allocations"),
        (40, "api/v1/gpus"),
        (12, "api/v1/refusals"),
        (20, "api/v1/changes"),
        (200, "api/v1/settings"),
        (12, "readyz?verbose"),
    ):
        assert f" of {count}. All of them: {path}" in text


def test_a_node_without_gpus_or_pods_says_so():
    facts = msgspec.structs.replace(busy(gpus=0), refusals=(), changes=())
    text = HtmlTree(html_of(facts)).text

    assert "There are no GPUs to share." in text
    assert "No container holds a share." in text
    assert 2 == text.count("None.")


def test_a_short_life_says_since_when_nothing_happened():
    facts = busy(gpus=1)
    facts = msgspec.structs.replace(facts, refusals=(), journal_since=facts.now)

    assert "None since 17:04:07 UTC." in HtmlTree(html_of(facts)).text


def lines_of(tree, kind):
    """The horizontal parts of the first bar of that kind."""
    (first, *_) = tree.of("path", **{"class": kind})
    return [
        tuple(map(int, part.replace("H", " ").split()[::2])) for part in first["d"].split("M")[1:]
    ]


def test_the_parts_of_a_bar_join_and_end_at_what_is_promised():
    tree = HtmlTree(page(gpus=1, each=4))

    parts = sorted(lines_of(tree, "p0") + lines_of(tree, "p1"))
    assert [0, *(end for _, end in parts)] == [*(start for start, _ in parts), parts[-1][1]]
    assert pytest.approx(1000 * (6144 + 8192 + 12288 + 4096) / 122_338, abs=2) == parts[-1][1]
    assert [(0, 132)] == lines_of(tree, "u")


def test_a_pod_whose_init_container_has_a_share_takes_no_more_of_the_bar_than_is_promised():
    share = a_share(uuid=a_uuid(0), memory_mib=61_169)
    rows = [a_row(container=name, role=role, shares=(share,)) for name, role in ROLES]
    tree = HtmlTree(page(gpus=1, ledger=Ledger(tuple(rows))))

    assert [(0, 500)] == lines_of(tree, "p0")


def test_a_gap_in_the_history_is_a_gap_in_its_line():
    tree = HtmlTree(page(gpus=5))
    lines = [found["d"] for found in tree.of("path") if "class" not in found]

    assert [1, 1, 1, 1, 2] == [line.count("M") for line in lines]


def test_what_is_not_known_or_not_limited_is_said_so():
    """What the agent does not know, and shares of plain mode."""
    shares = tuple(
        ShareStatus(gpu=f"{n}", uuid=f"GPU-{n}", memory_mib=mib) for n, mib in enumerate((0, None))
    )

    def busy_share(one: ShareStatus) -> ShareStatus:
        return msgspec.structs.replace(one, used_mib=512, gpu_percent=3)

    def beyond(one: ShareStatus) -> ShareStatus:
        return msgspec.structs.replace(one, gpu_percent=11)

    pair = (ShareStatus("0", "GPU-0", 1024, 10), ShareStatus("1", "GPU-1", 1024, 20))
    document = StatusDocument(
        node=NodeStatus(
            name="n",
            ready=False,
            observe=True,
            lock=LockStatus(since=None, holder="nonsense"),
            checks=(CheckStatus("api_synced", ok=False, text="not listed yet"),),
        ),
        gpus=(
            GpuStatus("GPU-0", mode="mps", condition="ok", obstacles=("it is withheld",)),
            GpuStatus("GPU-1", index=1, condition="unmonitored", used_mib=2048, sellable_mib=4096),
        ),
        allocations=(
            AllocationStatus("", "", "", shares=shares, mismatched=True),
            AllocationStatus("ns", "pod", "main", shares=pair, confirmed=False),
            AllocationStatus("ns", "odd", "main", shares=shares[:1] * 2),
            AllocationStatus("ns", "used", "main", shares=tuple(busy_share(one) for one in shares)),
            AllocationStatus("ns", "dark", "main", shares=shares[:1], unread="its file is a link"),
            AllocationStatus("ns", "free", "main", shares=pair[:1], unkept="it is off"),
            AllocationStatus("ns", "more", "main", shares=tuple(map(beyond, pair))),
            AllocationStatus("ns", "both", "main", shares=tuple(map(beyond, pair[:1] * 2))),
        ),
    )

    tree = HtmlTree(page_html(document, (SettingStatus("x", None, "f", pending=True),), NOON))

    for words in (
        "n not ready",
        "observes only",
        "Node lock not readable: nonsense",
        "API server not listed yet",
        "Driver not known",
        "not ready api_synced: not listed yet",
        "GPU-0 ok Promised",
        "Not offered: it is withheld. GPU-0 · mps",
        "Used not known Slices",
        "Used 2.0 GiB Slices",
        "not known yet The kubelet booked another GPU (HA-4006). 0, 1 all, no limit no limit",
        "ns/pod main The kubelet has not recorded the answer yet. 0, 1 2 x 1.0 GiB 10 %, 20 %",
        "ns/used main 0, 1 0.5 GiB, all, 0.5 GiB, no limit 2 x 3 %, no limit",
        "ns/dark main Its use is not known: its file is a link. 0 all no limit",
        "ns/odd main 0, 0 all no limit",
        "ns/free main Nothing keeps its limits: it is off. 0 1.0 GiB 10 %",
        "ns/more main 0, 1 2 x 1.0 GiB 11 of 10 %, over, 11 of 20 %",
        "ns/both main 0, 0 2 x 1.0 GiB 2 x 11 of 10 %, over",
        "x none From the next start on. f",
    ):
        assert words in tree.text, words


def test_what_a_container_uses_stands_beside_what_it_may_use():
    text = HtmlTree(page(gpus=1, each=2)).text

    assert "3.0 of 6.0 GiB 0 %, no limit 1 d" in text
    assert "4.0 of 8.0 GiB 1 of 5 % 1 s" in text


def test_of_many_pods_two_are_named_in_the_block_of_a_gpu_and_three_if_these_are_all():
    many = HtmlTree(page(gpus=1, each=5, name=lambda number: f"p{number}{'x' * 80}")).text
    three = HtmlTree(page(gpus=1, each=3, name=lambda number: f"p{number}")).text

    assert "…, 3 more 15 min:" in many
    assert "3 / 10: llm/p0, speech/p2, vision/p1 15 min:" in three
