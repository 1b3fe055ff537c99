"""The service under a real systemd: ready, told of, reloaded, stopped."""

import asyncio
import json
import re

import pytest

from agent import __version__
from agent.cluster import REGISTER
from agent.hami.annotations import read_register


async def test_a_start_returns_when_the_socket_serves_and_the_kubelet_was_told(node, table):
    known = len(node.cluster.kubelet.history.of("registered"))
    loop = asyncio.get_running_loop()

    began = loop.time()
    await node.systemctl("start")
    took = loop.time() - began

    assert 1 == len(node.endpoints())
    assert known + 1 == len(node.cluster.kubelet.history.of("registered"))
    await node.offers(80)

    def told() -> bool:
        return 8 == len(read_register(node.cluster.node_annotations().get(REGISTER)))

    # The node's own user is right enough to report.
    assert await node.cluster.until(told, 20), await node.last_words()
    assert "system:node:sandbox" == node.cluster.user
    shown = await node.shown()
    assert ("active", "running", "0") == tuple(
        shown[name] for name in ("ActiveState", "SubState", "NRestarts")
    )
    stamps = ("ExecMainStartTimestampMonotonic", "ActiveEnterTimestampMonotonic")
    began_at, ready_at = (int(shown[name]) for name in stamps)
    table.hold("systemd: exec → READY", (ready_at - began_at) / 1e6, 1.0)
    table.hold("systemctl start, until it returns", took, 1.5)


async def test_a_journal_entry_has_the_priority_the_unit_and_fields_in_json(node):
    await node.systemctl("start")
    await node.offers(80)
    await node.kill("HUP")
    await node.until_said("config.unchanged")

    entries = await node.journal()

    by_event = {json.loads(e["MESSAGE"])["event"]: e for e in entries}
    entry = by_event["agent.starting"]
    fields = json.loads(entry["MESSAGE"])
    assert ("6", "hami-agent.service", "hami-agent") == (
        entry["PRIORITY"],
        entry["_SYSTEMD_UNIT"],
        entry["SYSLOG_IDENTIFIER"],
    )
    assert (__version__, "sandbox", "info") == tuple(
        fields[name] for name in ("version", "node", "level")
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*Z", fields["ts"])


@pytest.mark.parametrize("count", ["5", "many"])
async def test_a_reload_takes_changed_settings_over_in_the_same_process_and_refused_ones_not(
    node, count
):
    # Without the reload the agent would read the file within five seconds.
    node.write("/etc/hami-agent/elsewhere/settings", "sharing: {splitCount: 10}\n")
    node.machine.path("/etc/hami-agent/config.yaml").symlink_to("elsewhere/settings")
    await node.systemctl("start")
    await node.offers(80)
    before = await node.shown()
    node.write("/etc/hami-agent/elsewhere/settings", f"sharing: {{splitCount: {count}}}\n")

    await node.systemctl("reload")

    if count == "5":
        await node.offers(40)
        await node.until_said("config.applied")
    else:
        said = await node.until_said("config.rejected")
        assert "/etc/hami-agent/config.yaml:1:" in said["err"]
        (entry,) = [e for e in await node.journal() if "config.rejected" in e["MESSAGE"]]
        assert "3" == entry["PRIORITY"]
        assert 80 == node.cluster.allocatable()
    after = await node.until_shown(ActiveState="active", SubState="running")
    assert before["MainPID"] == after["MainPID"]


async def test_a_stop_is_clean_soon_and_leaves_the_state(node, table):
    await node.systemctl("start")
    await node.offers(80)
    copy = await node.until_there("/var/lib/hami-agent/settings.json")
    loop = asyncio.get_running_loop()

    began = loop.time()
    await node.systemctl("stop")
    took = loop.time() - began

    shown = await node.shown()
    assert ("inactive", "success", "0") == tuple(
        shown[name] for name in ("ActiveState", "Result", "ExecMainStatus")
    )
    assert set() == node.endpoints()
    assert copy.is_file()
    table.hold("systemctl stop, until it returns", took, 2.0)
    assert took < 10


# The interpreter of the service: it heeds no variable of Python, and has nothing to compile.

BIN = "/opt/hami-agent/current/bin"
SAID = "/opt/verbose.txt"


async def test_no_variable_of_python_reaches_it_and_it_compiles_nothing_whatever_dates_files_have(
    node,
):
    files = ("/opt/hami-agent/current/lib", "-name", "*.py")
    await node.machine.run("find", *files, "-exec", "touch", "{}", "+")
    node.machine.path(SAID).unlink(missing_ok=True)
    verbose = f"ExecStart={BIN}/python3 -v -I -X faulthandler {BIN}/hami-agent run"
    for lines in (("Environment=PYTHONHOME=/nowhere",), ("ExecStart=", verbose)):
        await node.drop_in(
            *lines, "Environment=PYTHONPATH=/nowhere", f"StandardError=append:{SAID}"
        )
        await node.systemctl("start")
        await node.offers(80)
        await node.systemctl("stop")
        await node.offers(0)

    said = node.machine.path(SAID).read_text()
    assert "/agent/app/__pycache__/agent." in said
    assert [] == re.findall(r"^# code object from (/.*\.py)$", said, re.MULTILINE)
