"""systemd/install and systemd/uninstall on a real systemd."""

import asyncio
import functools
import re

import pytest

from agent import __version__
from tests.systemd.lab.bare_metal import READY
from tests.systemd.lab.made import BROKEN, LATER, name

HOME = "/opt/hami-agent"
FIRST = f"/src/dist/{name(__version__)}"
SECOND = f"/src/dist/{name(LATER)}"
THIRD = f"/src/dist/{name(BROKEN)}"


async def installed(node, *arguments):
    said = await node.install(*arguments)
    assert 0 == said.code, said
    return said.out


async def version(node):
    return (await node.machine.run("/usr/local/bin/hami-agent", "version")).split()[1]


async def versions(node):
    return (await node.machine.run("ls", f"{HOME}/versions")).split()


async def tree(node):
    """All files of the installation, with the time of their last change."""
    places = (HOME, "/etc/hami-agent", "/etc/systemd/system", "/usr/local/lib", "/usr/local/bin")
    found = await node.machine.run(
        "find", *places, "-not", "-type", "d", "-printf", "%p %T@ %m %l\\n"
    )
    return sorted(found.splitlines())


async def test_a_wheel_becomes_an_enabled_service_that_serves(bare, table):
    loop = asyncio.get_running_loop()

    began = loop.time()
    said = await installed(bare, FIRST)
    table.add("systemd/install of a wheel, 25 dependencies", loop.time() - began)

    assert "runs" in said
    await bare.offers(80)
    shown = await bare.until_shown(ActiveState="active", UnitFileState="enabled")
    assert "/usr/local/lib/systemd/system/hami-agent.service" == shown["FragmentPath"]
    assert __version__ == await version(bare)


async def test_the_same_wheel_again_changes_nothing_and_restarts_nothing(first, table):
    await first.offers(80)
    before, files = await first.until_shown(StatusText=READY), await tree(first)
    loop = asyncio.get_running_loop()

    began = loop.time()
    await installed(first, FIRST)
    table.add("systemd/install of the same wheel again", loop.time() - began)

    assert before == await first.shown()
    assert files == await tree(first)


async def test_an_upgrade_keeps_the_version_before_and_a_rollback_goes_back_to_it(first, table):
    """What an operator wrote is left alone."""
    env = first.machine.path("/etc/hami-agent/env").read_text()
    await first.drop_in("Environment=HAMI_AGENT_LOG_LEVEL=debug")
    await first.offers(80)
    known = first.registrations()

    await installed(first, SECOND)

    await first.serves_again(known)
    assert LATER == await version(first)
    assert 2 == len(await versions(first))
    history = first.cluster.kubelet.history
    again = history.of("registered")[-1].elapsed
    gone = max(one.elapsed for one in history.of("disconnected") if one.elapsed < again)
    back = min(one.elapsed for one in history.of("listed") if one.elapsed >= again)
    table.hold("systemd/install of another wheel: no slices for", back - gone, 2.0)

    for there in (__version__, LATER):
        await installed(first, "--rollback")
        assert there == await version(first)
        await first.offers(80)
        await first.until_shown(ActiveState="active")
    assert env == first.machine.path("/etc/hami-agent/env").read_text()
    assert first.machine.path("/etc/systemd/system/hami-agent.service.d/test.conf").exists()


UNCHANGED = "so nothing was changed"
REFUSED = {
    "does not start": (THIRD, f"{BROKEN}-", "does not start, for the reason above", "RuntimeError"),
    "settings": (SECOND, "refuses the settings", UNCHANGED, "sharing.splitCuont"),
    "variables": (SECOND, "refuses the settings", UNCHANGED, "HAMI_AGENT_SHARING_SPLIT_CUONT"),
    "masked": (SECOND, "is masked", UNCHANGED),
    "systemd": (SECOND, "Operation refused", " runs again\n"),
    "no dependencies": (SECOND, "the packages could not be installed"),
}


@pytest.mark.parametrize(("case", "told"), REFUSED.items(), ids=REFUSED)
async def test_an_install_that_cannot_go_on_says_why_and_the_version_before_runs(first, case, told):
    wheel, *words = told
    first.keep()
    await first.offers(80)
    before, files, install = await first.shown(), await tree(first), first.install
    kept = await versions(first)
    match case:
        case "settings":
            first.write("/etc/hami-agent/config.yaml", "sharing: {splitCuont: 10}\n")
        case "variables":
            first.settings(HAMI_AGENT_SHARING_SPLIT_CUONT="10")
        case "masked":
            await first.systemctl("mask", "--runtime")
        case "systemd":
            lines = "[Unit]\nRefuseManualStart=yes\n"
            first.write("/etc/systemd/system/hami-agent.service.d/test.conf", lines)
        case "no dependencies":
            first.machine.path("/opt/empty").mkdir(exist_ok=True)
            empty = ("/src/systemd/install", "--wheels", "/opt/empty")
            install = functools.partial(first.machine.try_run, *empty)

    said = await install(wheel)

    if case == "masked":
        await first.systemctl("unmask", "--runtime")
        assert files == await tree(first)
    assert (1, []) == (said.code, [word for word in words if word not in said.err]), said
    assert '"event":' not in said.err or case == "does not start"
    assert __version__ == await version(first)
    assert case != "no dependencies" or kept == await versions(first)
    after = await first.until_shown(ActiveState="active")
    assert UNCHANGED not in words or before["MainPID"] == after["MainPID"]
    await first.offers(80)


@pytest.mark.parametrize("left", ["a killed install", "no unit", "no variables"])
async def test_the_same_wheel_again_mends_what_is_missing(node, left):
    if left == "no variables":
        env = node.machine.path("/etc/hami-agent/env")
        env.unlink()
        await installed(node, "--no-start", FIRST)
        assert "\nKUBECONFIG=/etc/kubernetes/kubelet.conf\n" in env.read_text()
        await node.until_shown(ActiveState="inactive", UnitFileState="disabled")
        node.settings()
    elif left == "no unit":
        await node.machine.run("rm", "/usr/local/lib/systemd/system/hami-agent.service")
    else:
        place = (await node.machine.run("readlink", "-f", f"{HOME}/current")).strip()
        await node.machine.run("rm", f"{place}/.complete", f"{place}/bin/python3")

    await installed(node, FIRST)

    assert __version__ == await version(node)
    await node.until_shown(ActiveState="active", UnitFileState="enabled")


async def test_a_first_install_that_does_not_start_says_why(node):
    node.settings(KUBECONFIG="/nowhere")

    said = await node.install(FIRST)

    assert 1 == said.code
    assert "/nowhere: cannot be read" in said.err
    assert "systemctl restart hami-agent" in said.err


IMPOSSIBLE = (
    ((), 2, "which wheel?"),
    (("/src/dist/absent.whl",), 2, "there is no such file"),
    (("/src/wheels/lock.txt",), 2, "is no wheel of hami-agent"),
    (("--rollback", FIRST), 2, "--rollback takes no wheel"),
    (("--rollback",), 1, "there is no version before"),
    (("--forward", FIRST), 2, "there is no option --forward"),
    (("--python", "/bin/true", FIRST), 1, "no Python"),
    (("--python",), 2, "--python needs a path"),
)


async def test_what_cannot_be_done_is_told_in_one_sentence(bare):
    await bare.machine.run("/src/systemd/uninstall")  # of nothing is no error
    for arguments, code, text in IMPOSSIBLE:
        said = await bare.machine.try_run("/src/systemd/install", *arguments)

        assert (code, True) == (said.code, text in said.err), said
        assert said.err.startswith("install: ")


@pytest.mark.parametrize("has_unit", [True, False])
async def test_an_uninstall_leaves_settings_and_state_and_a_purge_does_not(first, has_unit):
    await first.offers(80)
    left = ("/etc/hami-agent/env", "/var/lib/hami-agent/settings.json")
    await first.until_there(left[1])
    if not has_unit:
        await first.machine.run("rm", "/usr/local/lib/systemd/system/hami-agent.service")
        await first.machine.run("systemctl", "daemon-reload")

    await first.machine.run("/src/systemd/uninstall")

    assert set() == first.endpoints()
    assert [True, True] == [first.machine.path(place).exists() for place in left]
    assert "0" == (await first.shown())["MainPID"]
    wanted = "/etc/systemd/system/multi-user.target.wants/hami-agent.service"
    for place in (HOME, "/run/hami-agent", "/usr/local/bin/hami-agent", wanted):
        test = f"test -e {place} || test -L {place}"
        assert 0 != (await first.machine.try_run("sh", "-c", test)).code, place
    assert "" == await first.machine.run("find", "/usr/local/lib", "-type", "f")
    assert "not-found" in await first.systemctl("show", "--property=LoadState")

    await first.machine.run("/src/systemd/uninstall", "--purge")
    assert [False, False] == [first.machine.path(place).exists() for place in left]
    assert 0 != (await first.machine.try_run("getent", "group", "hami-agent")).code


async def test_two_of_them_at_once_are_refused(first):
    await first.offers(80)
    for script, *arguments in (("uninstall",), ("install", FIRST)):
        said = await first.machine.try_run(
            *("flock", "/run/hami-agent-install.lock", f"/src/systemd/{script}", *arguments)
        )

        assert (1, True) == (said.code, "uninstall is under way" in said.err), said
    await first.until_shown(ActiveState="active")
    assert __version__ == await version(first)


# The version that runs is not the one that the link names.


async def runs(node):
    """The version whose process the service is."""
    shown = await node.until_shown(ActiveState="active")
    words = await node.machine.run("cat", f"/proc/{shown['MainPID']}/cmdline")
    (version,) = re.findall(rf"^{HOME}/versions/([^/]+)-[0-9a-f]+/", words)
    return version


async def test_a_version_that_was_only_put_in_its_place_waits_for_the_next_install(first):
    for wheel in (SECOND, THIRD):
        first.keep()
        await installed(first, "--no-start", wheel)
    assert {__version__, BROKEN} == {text.rpartition("-")[0] for text in await versions(first)}
    await installed(first, "--rollback")
    assert __version__ == await runs(first)

    first.keep()
    await installed(first, "--no-start", SECOND)
    assert __version__ == await runs(first)
    assert (await installed(first, SECOND)).endswith(" runs\n")
    assert LATER == await runs(first)
    await installed(first, "--rollback")
    assert __version__ == await runs(first)


async def test_after_a_killed_install_the_version_that_ran_is_gone_back_to(first):
    first.keep()
    await installed(first, "--no-start", THIRD)
    await first.machine.run("rm", f"{HOME}/previous")  # it was killed between its two links

    said = await first.install(THIRD)

    assert 1 == said.code
    assert f"{__version__}-" in said.err.splitlines()[-1]
    assert said.err.endswith(" runs again\n")
    assert __version__ == await runs(first)
