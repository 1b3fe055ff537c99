"""The envelope of the read API's answers."""

import pytest

from agent.errors import MalformedText
from agent.status import NodeStatus, envelope, open_envelope
from tests.builders import NOON

NODE = NodeStatus(name="n")


def test_what_is_wrapped_is_read_back_with_its_time() -> None:
    found, at = open_envelope(envelope("Node", NODE, NOON), "Node", NodeStatus)

    assert (NodeStatus(name="n"), NOON) == (found, at)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (envelope("Gpus", NODE, NOON), "the answer is a Gpus of hami-agent/v1; expected a Node"),
        (envelope("Node", (), NOON), "the answer is no Node of hami-agent/v1"),
        (envelope("Node", NODE, NOON.replace(year=1969)), "the answer is of the year 1969"),
    ],
    ids=["another kind", "another form", "no time"],
)
def test_another_answer_is_refused_with_what_is_wrong(content: bytes, why: str) -> None:
    with pytest.raises(MalformedText, match=why):
        open_envelope(content, "Node", NodeStatus)
