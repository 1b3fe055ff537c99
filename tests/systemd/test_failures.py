"""What systemd does when the agent dies, hangs or refuses to start."""

import asyncio

import pytest

from agent import __version__
from tests.systemd.lab.made import name

KILLS = 9
PAUSE = 0.5
"""Seconds between the end of a start that failed and the next one, as the unit has it."""
SOON = "WatchdogSec=5s"
"""The watchdog's time, cut short: its 30 s would be waited for in full."""
TIMED_OUT = "Watchdog timeout (limit 5s)!"


async def test_after_each_kill_it_serves_again(node, table):
    await node.systemctl("start")
    await node.offers(80)

    took = sorted([await back_after_a_kill(node) for _ in range(KILLS)])

    await node.until_shown(ActiveState="active", NRestarts=str(KILLS))
    what = f"systemd: SIGKILL → the kubelet has 80 slices again, {{}} of {KILLS}"
    table.hold(what.format("median"), took[KILLS // 2], 1.0)
    table.hold(what.format("worst"), took[-1], 2.0)


async def back_after_a_kill(node):
    """Seconds from the kill until the kubelet has everything again."""
    loop = asyncio.get_running_loop()
    known = node.registrations()
    began = loop.time()
    await node.kill("KILL")
    await node.serves_again(known)
    return loop.time() - began


async def test_an_event_loop_that_froze_is_killed_says_where_it_was_and_is_started_again(node):
    await node.drop_in(SOON)
    node.packages().joinpath("freezing.pth").write_text("/src/freeze\nimport freezing\n")
    await node.systemctl("start")
    await node.offers(80)
    node.packages().joinpath("freezing.pth").unlink()
    known = node.registrations()

    await node.kill("USR1")

    await node.serves_again(known)
    await node.until_restarted(1)
    await node.until_shown(ActiveState="active")
    await node.until_words(TIMED_OUT, "status=6/ABRT", "freezing.py")
    words = [entry["MESSAGE"] for entry in await node.journal()]
    assert any("freezing.py" in word and "in _spin" in word for word in words)


@pytest.mark.parametrize("start", ["/bin/sh -c 'kill -SEGV $$$$'", "/nowhere"])
async def test_starts_that_end_at_once_are_no_busy_loop(node, start):
    await node.systemctl("start")
    await node.offers(80)
    await node.drop_in("ExecStart=", f"ExecStart={start}")
    loop = asyncio.get_running_loop()

    began = loop.time()
    await node.kill("KILL")
    await node.until_restarted(6, within=60)

    # The kill of a process that served is followed at once, and each of the others after a pause.
    assert 5 * PAUSE < loop.time() - began


@pytest.mark.parametrize(
    ("wrong", "status", "told"),
    [
        ("settings", "78", "/etc/hami-agent/config.yaml:1:"),
        ("/etc/hami-agent/kubeconfig", "78", ": cannot be read"),
        ("~/kubeconfig", "78", ": cannot be read"),
        ("Group=nobodys-group", "216", ""),
        ("User=nobody-at-all", "217", ""),
    ],
)
async def test_what_cannot_start_is_held_until_an_operator_starts_it(node, wrong, status, told):
    if wrong == "settings":
        node.write("/etc/hami-agent/config.yaml", "sharing: {splitCuont: 10}\n")
    elif "=" in wrong:
        await node.drop_in(wrong)
    else:  # the service sees no home, and is not allowed another user's file
        wrong = wrong.replace("~", "/root")
        node.write(wrong, node.cluster.places.kubeconfig.read_text(), 0o600)
        node.settings(KUBECONFIG=wrong)
        owner = "root" if wrong.startswith("/root") else "nobody"
        await node.machine.run("chown", owner, wrong)

    said = await node.machine.try_run("systemctl", "start", "hami-agent")

    assert 0 != said.code
    await asyncio.sleep(2)
    shown = await node.until_shown(ActiveState="failed", Result="exit-code", NRestarts="0")
    assert status == shown["ExecMainStatus"]
    if told:
        await node.until_words(told)
        if wrong == "settings":
            (entry,) = await node.journal()
            assert "sharing.splitCuont" in entry["MESSAGE"]
        else:
            failed = await node.until_said("agent.failed")
            assert f"{wrong}{told}" in failed["err"]
            await node.machine.run("rm", wrong)
    else:
        await node.drop_in()
        await node.systemctl("start")
        await node.offers(80)


async def test_a_lost_group_is_made_again_and_the_service_started_by_the_same_install(node):
    await node.machine.run("groupdel", "hami-agent")
    held = await node.machine.try_run("systemctl", "start", "hami-agent")
    await node.until_shown(ActiveState="failed", ExecMainStatus="216", NRestarts="0")

    said = await node.install(f"/src/dist/{name(__version__)}")

    assert (True, 0) == (held.code != 0, said.code), said
    await node.offers(80)
