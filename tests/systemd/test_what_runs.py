"""systemd/install where the version that runs is not the one that the link names."""

import re

from agent import __version__
from tests.systemd.lab.made import BROKEN, LATER, name

HOME = "/opt/hami-agent"
SECOND = f"/src/dist/{name(LATER)}"
THIRD = f"/src/dist/{name(BROKEN)}"


async def runs(node):
    """The version whose process the service is."""
    shown = await node.until_shown(ActiveState="active")
    words = await node.machine.run("cat", f"/proc/{shown['MainPID']}/cmdline")
    (version,) = re.findall(rf"^{HOME}/versions/([^/]+)-[0-9a-f]+/", words)
    return version


async def versions(node):
    """The versions that are on the machine."""
    names = (await node.machine.run("ls", f"{HOME}/versions")).split()
    return {text.rpartition("-")[0] for text in names}


async def put(node, wheel):
    """Put a wheel in its place and leave the service as it is."""
    said = await node.install("--no-start", wheel)
    assert 0 == said.code, said


async def killed_before_the_restart(node, wheel):
    """What an install leaves that was killed between its two links."""
    await put(node, wheel)
    await node.machine.run("rm", f"{HOME}/previous")


async def test_a_version_that_was_only_put_in_its_place_is_started_by_the_next_install(first):
    await put(first, SECOND)
    assert __version__ == await runs(first)

    said = await first.install(SECOND)

    assert (0, True) == (said.code, said.out.endswith(" runs\n")), said
    assert LATER == await runs(first)
    assert 0 == (await first.install("--rollback")).code
    assert __version__ == await runs(first)


async def test_after_a_killed_install_the_version_that_ran_is_gone_back_to(first):
    await killed_before_the_restart(first, THIRD)

    said = await first.install(THIRD)

    assert 1 == said.code
    assert f"{__version__}-" in said.err.splitlines()[-1]
    assert said.err.endswith(" runs again\n")
    assert __version__ == await runs(first)


async def test_the_version_that_runs_stays_however_many_are_put_in_its_place(first):
    await put(first, SECOND)
    await put(first, THIRD)

    assert {__version__, BROKEN} == await versions(first)
    assert 0 == (await first.install("--rollback")).code
    assert __version__ == await runs(first)
