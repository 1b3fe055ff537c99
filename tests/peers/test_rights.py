"""Over all that the tests before made the agent do: it asked for nothing but what is granted.

The last test of a run: conftest.py sees to that. Most tests run the agent as the node's own user,
whose rights are others, so a right that the account lacks would not show in them.
"""

from tests.peers.lab.audit import counted
from tests.peers.lab.cluster import ACCOUNT
from tests.peers.lab.identities import NODE_USER
from tests.peers.lab.rights import EVERYBODYS, OPTIONAL, granted


async def test_every_request_of_all_tests_is_granted_to_the_account(cluster):
    audit = cluster.plane.audit

    asked = [one for user in (NODE_USER, ACCOUNT) for one in audit.since(0, user)]

    assert asked, "run it behind other tests: no agent has asked for anything yet"
    assert set() == counted(asked).keys() - granted() - OPTIONAL - EVERYBODYS
