"""The service may do what it needs, and next to nothing besides."""

import re

import pytest
import pytest_asyncio

ASK = """
import socket, sys
with socket.socket(socket.AF_UNIX) as caller:
    caller.connect("/run/hami-agent/api.sock")
    caller.sendall(b"GET /readyz HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
    print(caller.recv(64).split(b"\\r\\n")[0].decode())
"""


@pytest_asyncio.fixture(loop_scope="session")
async def pid(node):
    await node.systemctl("start")
    await node.offers(80)
    await node.until_said("web.listening")
    await node.until_there("/var/lib/hami-agent/settings.json")
    return (await node.shown())["MainPID"]


async def test_the_process_is_root_without_anything_that_makes_root_special(node, pid):
    status = await node.machine.run("cat", f"/proc/{pid}/status")
    found = dict(re.findall(r"^(\w+):\s+(.*)$", status, re.MULTILINE))

    assert {"0000000000000000"} == {found[name] for name in ("CapPrm", "CapEff", "CapBnd")}
    assert ("1", "2") == (found["NoNewPrivs"], found["Seccomp"])
    assert {"0"} == set(found["Uid"].split())


@pytest.mark.parametrize(
    "place", ["/etc/hami-agent", "/opt/hami-agent", "/usr/local/bin", "/var/lib", "/var/log"]
)
async def test_it_cannot_write_where_it_has_nothing_to_write(node, pid, place):
    said = await node.machine.try_run("nsenter", "-t", pid, "-m", "touch", f"{place}/x")

    assert "Read-only file system" in said.err


@pytest.mark.parametrize(
    "place",
    [
        "/var/lib/hami-agent",
        "/run/hami-agent",
        "/usr/local/vgpu",
        "/var/lib/kubelet/device-plugins",
    ],
)
async def test_it_can_write_where_its_work_is(node, pid, place):
    await node.machine.run("nsenter", "-t", pid, "-m", "touch", f"{place}/x")
    await node.machine.run("rm", f"{place}/x")


async def test_it_sees_no_home_directory(node, pid):
    said = await node.machine.try_run("nsenter", "-t", pid, "-m", "ls", "-A", "/root")

    assert "" == said.out


async def test_members_of_the_group_may_ask_its_socket_and_nobody_else(node, pid):
    gid = (await node.machine.run("getent", "group", "hami-agent")).split(":")[2]
    mine, theirs = [
        await node.machine.try_run(
            *("setpriv", "--reuid", "65534", "--regid", group, "--clear-groups"),
            *("/usr/bin/python3", "-c", ASK),
        )
        for group in (gid, "65534")
    ]

    assert "HTTP/1.1 200" in mine.out
    assert "PermissionError" in theirs.err


async def test_its_sockets_and_state_are_nobody_elses(node, pid):
    (endpoint,) = node.endpoints()
    modes = {
        place: await node.machine.run("stat", "--format=%a %U", place)
        for place in (
            *(f"/var/lib/kubelet/device-plugins/{endpoint}", "/var/lib/hami-agent/settings.json"),
            *("/var/lib/hami-agent", "/run/hami-agent", "/run/hami-agent/api.sock"),
        )
    }

    assert ["600", "600", "750", "750", "660"] == [text.split()[0] for text in modes.values()]
    assert {"root"} == {text.split()[1] for text in modes.values()}
