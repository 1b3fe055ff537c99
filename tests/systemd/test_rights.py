"""The service may do what it needs, and next to nothing besides."""

import re

ASK = """
import socket, sys
with socket.socket(socket.AF_UNIX) as caller:
    caller.connect("/run/hami-agent/api.sock")
    caller.sendall(b"GET /readyz HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
    print(caller.recv(64).split(b"\\r\\n")[0].decode())
"""
OWN = "/var/lib/hami-agent /run/hami-agent /usr/local/vgpu /var/lib/kubelet/device-plugins"
OTHERS = "/etc/hami-agent /opt/hami-agent /usr/local/bin /var/lib /var/log"


async def test_a_service_at_work_has_no_right_that_it_does_not_need(node):
    await node.systemctl("start")
    await node.offers(80)
    await node.until_said("web.listening")
    await node.until_there("/var/lib/hami-agent/settings.json")
    pid = (await node.shown())["MainPID"]

    # It is root without anything that makes root special, and what is its own is root's.
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

    # It can write where its work is and nowhere else, and sees no home.
    inside = ("nsenter", "-t", pid, "-m")
    for place in OWN.split():
        await node.machine.run(*inside, "touch", f"{place}/x")
        await node.machine.run("rm", f"{place}/x")
    for place in OTHERS.split():
        refused = await node.machine.try_run(*inside, "touch", f"{place}/x")
        assert "Read-only file system" in refused.err
    assert "" == (await node.machine.try_run(*inside, "ls", "-A", "/root")).out

    # Members of its group may ask its socket, and nobody else.
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
