"""The interpreter of the service: it heeds no variable of Python, and has nothing to compile."""

import re

import pytest_asyncio

from agent import __version__
from tests.systemd.lab.made import name

BIN = "/opt/hami-agent/current/bin"
SAID = "/opt/verbose.txt"
OTHER = "/opt/python"
COPIED = """
mkdir -p {0}/bin {0}/lib
cp -L /usr/bin/python3 {0}/bin
cp -r $(python3 -c 'import os; print(os.path.dirname(os.__file__))') {0}/lib
find {0} -name __pycache__ -prune -exec rm -r {{}} +
"""


@pytest_asyncio.fixture(loop_scope="session")
async def other(bare):
    """The machine without the agent, and with a Python that came without bytecode."""
    await bare.machine.run("sh", "-ec", COPIED.format(OTHER))
    yield bare
    await bare.clear()
    await bare.machine.run("/src/systemd/uninstall", "--purge")
    await bare.machine.run("rm", "-r", OTHER)


async def compiled_at_a_start(node, program):
    """The sources that the service compiles until it has served and stopped."""
    verbose = f"ExecStart={BIN}/python3 -v -I -X faulthandler {program} run"
    await node.drop_in("ExecStart=", verbose, f"StandardError=append:{SAID}")
    node.machine.path(SAID).unlink(missing_ok=True)
    await node.systemctl("start")
    await node.offers(80)
    await node.systemctl("stop")
    said = node.machine.path(SAID).read_text()
    assert "/agent/app/__pycache__/agent." in said
    return re.findall(r"^# code object from (/.*\.py)$", said, re.MULTILINE)


async def test_no_variable_of_python_reaches_the_service(node):
    await node.drop_in("Environment=PYTHONHOME=/nowhere PYTHONPATH=/nowhere")

    await node.systemctl("start")

    await node.offers(80)


async def test_a_start_compiles_nothing_whatever_dates_the_files_have(node):
    files = ("/opt/hami-agent/current/lib", "-name", "*.py")
    await node.machine.run("find", *files, "-exec", "touch", "{}", "+")

    assert [] == await compiled_at_a_start(node, f"{BIN}/hami-agent")


async def test_a_start_compiles_nothing_of_a_python_that_came_without_bytecode(other):
    wheel = f"/src/dist/{name(__version__)}"
    said = await other.install("--no-start", "--python", f"{OTHER}/bin/python3", wheel)
    assert 0 == said.code, said

    assert [] == await compiled_at_a_start(other, "-m agent")
