"""The sandbox's copy of the agent's log: bounded, and what is looked up later stays."""

import json

from agent.sandbox.lab.child import KEPT_LINES, AgentLog


def test_where_the_web_door_is_stays_known_however_much_is_said_after_it():
    log = AgentLog(lambda: None)
    log.add(0.0, 7, json.dumps({"event": "web.listening", "port": 1}).encode())
    for number in range(KEPT_LINES):
        log.add(float(number), 7, json.dumps({"event": "other"}).encode())

    assert [1] == [line.fields["port"] for line in log.of("web.listening", 7)]
    assert [] == log.of("web.listening", 8)
    assert KEPT_LINES == len(list(log))
