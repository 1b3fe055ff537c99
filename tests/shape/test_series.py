"""What is counted is published: every tally of the tree stands in the list of series."""

import collections
import re

from tests.shape import tree

OWNED = re.compile(r"self\.(\w+) = (?:Tally|Histogram)\(")


def test_every_tally_that_a_part_owns_is_published():
    owned = collections.Counter(
        name
        for path in tree.files()
        if path.parts[0] == "agent" and path.suffix == ".py" and path.parts[1] != "sandbox"
        for name in OWNED.findall(tree.text(path))
    )
    of_the_api_server = re.search(
        r"tallies = \((.*?)\n +\)", tree.text("agent/app/agent.py"), re.DOTALL
    )
    of_all = tree.text("agent/app/web.py").partition("def _services_of")[2]
    published = collections.Counter(re.findall(r"\.(\w+)[,\])]", of_all + of_the_api_server[1]))

    assert owned
    assert {} == owned - published
