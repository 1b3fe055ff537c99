"""Reads a page as a browser does, as far as the tests ask: elements, attributes and text."""

import html.parser
from dataclasses import dataclass, field

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

    def of(self, tag, **attributes):
        """The attributes of each such element."""
        return [
            found
            for name, found in self.elements
            if name == tag and attributes.items() <= found.items()
        ]
