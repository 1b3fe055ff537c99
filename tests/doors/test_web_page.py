"""The page at `/`: what it says, its escaping and size, who may read it, and its policy."""

import base64
import datetime as dt
import hashlib
import html.parser
import re
from dataclasses import dataclass, field

import msgspec
import pytest

from agent.cluster import MUTEX_LOCK, NodeView
from agent.node import Check
from agent.status import (
    POD_COLUMNS,
    AllocationStatus,
    NodeStatus,
    StatusDocument,
    notices,
    pod_rows,
    status_of,
)
from agent.web.page import ENTRIES, ROWS, page_html
from agent.web.runbook import runbook_text
from agent.web.server import HEADERS, reading_pages, stands_by
from tests.builders import NOON
from tests.doors.page_facts import busy
from tests.doors.web_client import client_of
from tests.recorded import FOLDER, golden

POLICY = "Content-Security-Policy"
LARGEST = 2_000_000
"""Bytes of the page, whatever the cluster says: the agent may take 192 MB."""
LONG = "<" * 900
EVIL = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style></title></script><b>x</b>",
    "&lt;b&gt;<!--",
    "two\x00\x1b[2J\r\nlines\u202ehidden\ud800",
)


def page(**changes):
    return html_of(busy(**changes))


def html_of(facts):
    return page_html(status_of(facts), facts.now)


UNKNOWN = msgspec.json.decode((FOLDER / "page-unknown.json").read_bytes(), type=StatusDocument)
"""A node of which the agent knows little, and containers of each kind."""
PAIR = UNKNOWN.allocations[1].shares


def without_script():
    """A busy node, and one of which little is known, as they are read without any script."""
    facts = busy(gpus=4, each=2)
    few = {"changes": lambda: facts.changes()[:4], "refusals": lambda: facts.refusals()[:2]}
    node = page(gpus=4, each=2, **few)
    unknown = page_html(UNKNOWN, NOON)
    lines = [*HtmlTree(node).lines, "=" * 9, *HtmlTree(unknown).lines]
    return "".join(f"{line}\n" for line in lines)


def test_without_any_script_everything_is_there():
    found = without_script()
    assert golden("page.txt", found) == found
    # What needs the script is hidden until it runs.
    assert [{"id": "filtering", "hidden": None}] == [
        found for _, found in HtmlTree(page()).elements if "hidden" in found
    ]


def named(text):
    """A page with that text in every place where the cluster's text stands."""
    facts = busy(gpus=2, each=2, name=lambda number: f"{text}{number}", text=text)
    notes = {MUTEX_LOCK: f"not a lock {text}"}
    return html_of(
        msgspec.structs.replace(
            facts,
            about=msgspec.structs.replace(facts.about, name=text, resource=text, kubelet=text),
            checks=(Check("state", ok=False, text=text),),
            node=NodeView("n", "u", "1", annotations=notes),
            changes=lambda: facts.changes()[:4],
            refusals=lambda: facts.refusals()[:4],
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


def test_each_id_is_a_link_to_its_text_of_the_runbook():
    found = html_of(busy(gpus=2, each=2, text='"><HA-4002> of XID 79 [H-079]'))
    links = [given["href"] for tag, given in HtmlTree(found).elements if tag == "a"]
    ids = {link.removeprefix("runbook/") for link in links if link.startswith("runbook/")}

    assert {"HA-4002", "H-079"} <= ids
    assert all(runbook_text(name).startswith(name) for name in ids)
    link = '<a href="runbook/HA-4002">HA-4002</a>'
    assert f"&quot;&gt;&lt;{link}&gt; of XID 79" in found


@pytest.mark.parametrize(
    ("used", "percent", "ago", "idle"),
    [
        # Without a time of the last kernel, as in HAMi-core's oldest layout.
        (None, None, None, "-"),
        (0, 0, None, "no use seen"),
        (512, 0, None, "-"),
        (512, 3, None, "busy"),
        (512, 0, 120, "2 min"),
        (None, None, 120, "-"),  # of a lost GPU: it may have computed until then
    ],
)
def test_idle_says_no_more_than_is_known(used, percent, ago, idle):
    share = msgspec.structs.replace(PAIR[0], used_mib=used, gpu_percent=percent)
    last = NOON - dt.timedelta(seconds=ago) if ago else None
    one = AllocationStatus("ns", "pod", "main", shares=(share,), last_kernel=last)
    (row,) = pod_rows(msgspec.structs.replace(UNKNOWN, allocations=(one,)), NOON)

    assert idle == row[[column.title for column in POD_COLUMNS].index("IDLE")]


def test_a_check_is_told_once_and_one_without_a_text_hides_no_other():
    told = {"state": "", "driver": "it is slow", "disk": "full", "offer": "no slice: full"}
    checks = tuple(Check(name, ok=False, text=text) for name, text in told.items())
    node = NodeStatus("n", checks=checks)

    texts = [text for text, _ in notices(StatusDocument(node, ()), NOON)]
    assert ["not ready: state: ", "not ready: driver: it is slow", "not ready: disk: full"] == texts


def distinct(entries, times):
    """That many of each, no two of which say the same."""
    many = enumerate((*entries,) * times)
    return tuple(msgspec.structs.replace(one, reason=f"{one.reason}{n}") for n, one in many)


def test_whatever_there_is_the_page_is_bounded_and_says_what_is_left_out():
    whole = busy(gpus=40, each=10, name=lambda number: f"{LONG}{number}", text=LONG)
    checks = tuple(Check(f"{LONG}{n}", ok=False, text=LONG) for n in range(50))
    facts = msgspec.structs.replace(
        whole,
        checks=checks,
        changes=lambda: distinct(whole.changes(), 9),
        refusals=lambda: distinct(whole.refusals(), 9),
    )

    found = html_of(facts)
    text = HtmlTree(found).text

    assert len(found.encode()) < LARGEST
    for shown, count in ((ROWS, 400), (ENTRIES, 108), (ENTRIES, 180), (ENTRIES, 54)):
        assert f"The first {shown} of {count}. All of them: api/v1/status" in text


def test_equal_entries_are_one_with_their_number_and_what_else_they_are_about():
    node = busy(gpus=2, each=1)
    said = "GPU {} is lost: it does not answer [H-LOST]"
    changes = [msgspec.structs.replace(node.changes()[0], text=said.format(n)) for n in range(8)]
    text = HtmlTree(html_of(msgspec.structs.replace(node, changes=lambda: tuple(changes)))).text

    assert 1 == text.count("it does not answer")
    lost = "GpuUnhealthy: GPU 0 is lost: it does not answer [H-LOST]"
    assert f"{lost} (8 times; also GPU 1, GPU 2, GPU 3, GPU 4, GPU 5 and 2 more)" in text
    assert "research/probe-0/main: " in text
    assert "(12 times; also research/probe-1/main" in text


def reading(made=busy, policy="local"):
    """A client of a server of the page of `made()`."""
    return client_of(reading_pages(made, policy))


@pytest.mark.looptime(False)
async def test_its_policy_admits_exactly_the_style_and_the_script_that_are_in_it():
    async with reading() as client, client.get("/") as answer:
        html = await answer.text()
        headers = dict(answer.headers)

    assert (200, "text/html; charset=utf-8") == (answer.status, headers["Content-Type"])
    assert (True, True) == (html.startswith("<!DOCTYPE html>"), html.endswith("</html>\n"))
    policy = headers[POLICY]
    assert {**HEADERS, POLICY: policy} == {name: headers[name] for name in HEADERS}
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for name in ("style", "script"):
        (content,) = re.findall(f"<{name}>(.*?)</{name}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" == rules.pop(f"{name}-src")
    assert {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    } == rules


@pytest.mark.looptime(False)
async def test_a_standby_answers_a_sentence_and_a_browser_asks_again():
    async with client_of({"/": stands_by}) as client, client.get("/") as answer:
        text = await answer.text()

    assert (503, "3", "3") == (
        answer.status,
        answer.headers["Refresh"],
        answer.headers["Retry-After"],
    )
    assert text.startswith("This agent stands by; ask again when it serves.")


UNPARSED = {"script", "style"}
INLINE = {"a", "b", "code", "i", "small", "span", "strong", "time"}
"""Elements that do not part their text from what stands beside them."""
CELLS = {"dd", "td", "th"}


@dataclass
class HtmlTree(html.parser.HTMLParser):
    """The elements with their attributes in order, and all text that people see."""

    page: str
    elements: list = field(default_factory=list)
    seen: list = field(default_factory=list)

    def __post_init__(self):
        super().__init__()
        self._within = ""
        self.feed(self.page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._within = tag
        self.seen.append("" if tag in INLINE else " " if tag in CELLS else "\n")

    def handle_endtag(self, tag):
        self._within = ""

    def handle_data(self, data):
        if self._within not in UNPARSED:
            self.seen.append(data)

    @property
    def tags(self):
        return [tag for tag, _ in self.elements]

    @property
    def lines(self):
        """The text of each element that stands for itself, as one line."""
        lines = (" ".join(line.split()) for line in "".join(self.seen).split("\n"))
        return [line for line in lines if line]

    @property
    def text(self):
        return " ".join("".join(self.seen).split())
