"""The service may do what it needs, and next to nothing besides."""

import re

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


async def test_it_is_root_without_anything_that_makes_root_special_and_what_is_its_own_is_roots(
    node, pid
):
    status = await node.machine.run("cat", f"/proc/{pid}/status")
    found = dict(re.findall(r"^(\w+):\s+(.*)$", status, re.MULTILINE))
    assert {"0000000000000000"} == {found[name] for name in ("CapPrm", "CapEff", "CapBnd")}
    assert ("1", "2", {"0"}) == (found["NoNewPrivs"], found["Seccomp"], {*found["Uid"].split()})

    (endpoint,) = node.endpoints()
    modes = {
        f"/var/lib/kubelet/device-plugins/{endpoint}": "600",
        "/run/hami-agent": "750",
        "/var/lib/hami-agent/settings.json": "600",
        "/var/lib/hami-agent": "750",
        "/run/hami-agent/api.sock": "660",
    }
    said = await node.machine.run("stat", "--format=%n %a %U", *modes)
    assert [f"{place} {mode} root" for place, mode in modes.items()] == said.splitlines()


OWN = "/var/lib/hami-agent /run/hami-agent /usr/local/vgpu /var/lib/kubelet/device-plugins"
OTHERS = "/etc/hami-agent /opt/hami-agent /usr/local/bin /var/lib /var/log"


async def test_it_can_write_where_its_work_is_and_nowhere_else_and_sees_no_home(node, pid):
    inside = ("nsenter", "-t", pid, "-m")
    for place in OWN.split():
        await node.machine.run(*inside, "touch", f"{place}/x")
        await node.machine.run("rm", f"{place}/x")
    for place in OTHERS.split():
        said = await node.machine.try_run(*inside, "touch", f"{place}/x")
        assert "Read-only file system" in said.err
    assert "" == (await node.machine.try_run(*inside, "ls", "-A", "/root")).out


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
