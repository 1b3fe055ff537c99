"""Starting the agent: root gives up its capabilities where it has any to give up."""

import pytest

from agent.sandbox.lab.child import may_drop

ALL, OF_A_CONTAINER, NONE = "000001ffffffffff", "00000000a80425fb", "0000000000000000"


@pytest.mark.parametrize(
    ("uid", "capabilities", "expected"),
    [
        (0, ALL, True),
        (0, OF_A_CONTAINER, True),
        (0, NONE, False),
        (0, "00000000000000ff", False),
        (1000, NONE, False),
        (1000, ALL, False),
    ],
    ids=["root", "root in a container", "bare root", "no right to", "a user", "a user with all"],
)
def test_only_who_has_the_right_to_gives_up_capabilities(uid, capabilities, expected):
    status = f"Name:\tpython: x\nUid:\t1000\t{uid}\t{uid}\t{uid}\nCapEff:\t{capabilities}\n"

    assert expected == may_drop(status)
