"""The interpreter of the service: it heeds no variable of Python, and has nothing to compile."""

import re

BIN = "/opt/hami-agent/current/bin"
SAID = "/opt/verbose.txt"


async def test_no_variable_of_python_reaches_the_service(node):
    await node.drop_in("Environment=PYTHONHOME=/nowhere PYTHONPATH=/nowhere")

    await node.systemctl("start")

    await node.offers(80)


async def test_a_start_compiles_nothing_whatever_dates_the_files_have(node):
    files = ("/opt/hami-agent/current/lib", "-name", "*.py")
    await node.machine.run("find", *files, "-exec", "touch", "{}", "+")

    verbose = f"ExecStart={BIN}/python3 -v -I -X faulthandler {BIN}/hami-agent run"
    await node.drop_in("ExecStart=", verbose, f"StandardError=append:{SAID}")
    node.machine.path(SAID).unlink(missing_ok=True)
    await node.systemctl("start")
    await node.offers(80)
    await node.systemctl("stop")
    said = node.machine.path(SAID).read_text()
    assert "/agent/app/__pycache__/agent." in said
    assert [] == re.findall(r"^# code object from (/.*\.py)$", said, re.MULTILINE)
