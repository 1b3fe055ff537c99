"""The image holds the agent and what it runs on, in a known order, and nothing to build with."""

import stat
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from agent import __version__
from deploy.facts import MEGABYTE, SIZES
from tests.image.lab.archive import ImageArchive

ROOT = Path(__file__).resolve().parents[2]
SITE = "opt/hami-agent/lib/python3.13/site-packages/"
TOOLS = {"as", "c++", "cc", "g++", "gcc", "gmake", "go", "ld", "make", "rustc", "tcc"}


def test_two_builds_are_the_same_image(facts, image):
    assert facts["digest"] == facts["again"] == image.digest


def test_it_and_what_the_agent_adds_to_its_base_is_no_larger_than_promised(facts, base, image):
    assert all(facts[kind] <= most * MEGABYTE for kind, most in SIZES[base].items())
    added = Counter[str]()
    for layer in image.layers[1:]:
        for name, member in layer.items():
            added[name.partition("/")[0]] += member.size

    assert added.pop("opt") <= 35 * MEGABYTE
    # Python's library, compiled.
    assert added.pop("usr", 0) <= 12 * MEGABYTE
    assert 0 == added.total()


def test_a_change_of_the_agent_changes_the_last_layer_alone(image):
    _, needed, agent = image.layers
    own = {name for name in agent if not agent[name].isdir()}

    assert own
    assert not any(name.startswith((SITE + "agent/", SITE + "hami_agent")) for name in needed)
    assert {
        name for name in own if not name.startswith((SITE + "agent/", SITE + "hami_agent"))
    } == {"opt/hami-agent/bin/hami-agent", "opt/hami-agent/bin/kubectl-hami"}


def test_it_says_who_runs_what_and_what_it_is(image):
    assert "65532:65532" == image.config["User"]
    assert ["/opt/hami-agent/bin/hami-agent"] == image.config["Entrypoint"]
    assert ["run"] == image.config["Cmd"]
    assert image.platform in {"linux/amd64", "linux/arm64"}
    prefix = "org.opencontainers.image."
    labels = image.config["Labels"]

    assert {"title", "description", "licenses", "version", "revision"} <= {
        key.removeprefix(prefix) for key in labels if labels[key]
    }
    assert __version__ == labels[prefix + "version"]


def test_it_holds_the_versions_of_the_lock(contents):
    locked = {
        package["name"]: package
        for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {line.split(">")[0].split("~")[0].split("[")[0] for line in project["dependencies"]}

    versions = dict(contents)

    assert {"hami-agent"} | named <= set(versions)
    assert __version__ == versions.pop("hami-agent")
    assert {name: locked[name]["version"] for name in versions} == versions


def test_every_package_of_the_agent_is_in_the_list_of_contents(image, contents):
    installed = {
        name.removeprefix(SITE).split("-")[0].replace("_", "-").lower()
        for layer in image.layers
        for name in layer
        if name.startswith(SITE) and name.endswith(".dist-info/METADATA")
    }

    assert len(installed) > 20
    assert installed == set(contents)


def commands(image: ImageArchive) -> set[str]:
    return {
        Path(name).name
        for layer in image.layers
        for name, member in layer.items()
        if not member.isdir() and Path(name).parent.name in {"bin", "sbin", "libexec"}
    }


def test_it_has_nothing_to_build_with_and_what_the_agent_adds_belongs_to_root(image):
    added = [one for layer in image.layers[1:] for one in layer.values()]

    assert set() == commands(image) & TOOLS
    assert not any(name.endswith(("-gcc", "-ld", "-as")) for name in commands(image))
    assert not any("/pip/" in one.name for one in added)
    # Nobody else writes it.
    assert [] == [
        one.name for one in added if one.uid or one.gid or (not one.issym() and one.mode & 0o022)
    ]


@pytest.mark.parametrize("base", ["small"], indirect=True)
def test_the_small_one_has_no_tool_no_pip_and_nothing_that_gives_more_rights(image):
    programs = {"hami-agent", "kubectl-hami", "idna"}
    assert programs | {"protoc-gen-grpclib_python", "protoc-gen-python_grpc"} == {
        name for name in commands(image) if not name.startswith("python")
    }
    assert not any("/pip/" in name or "/ensurepip/" in name for name in image.layers[0])
    files = (one for layer in image.layers for one in layer.values() if not one.isdir())
    assert [] == [one.name for one in files if one.mode & (stat.S_ISUID | stat.S_ISGID)]


def test_it_says_nothing_of_the_machine_that_built_it(image):
    base = image.layers[0]

    assert {"etc/hostname", "etc/resolv.conf"}.isdisjoint(base)
    assert {1} == {len({member.mtime for member in layer.values()}) for layer in image.layers[1:]}


def compiled(sources: set[str]) -> set[str]:
    """Where Python looks for what it made of these."""
    return {
        str(path.parent / "__pycache__" / f"{path.stem}.cpython-313.pyc")
        for path in map(Path, sources)
    }


PACKAGES = ("asyncio", "concurrent", "email", "http", "json", "logging")


@pytest.mark.parametrize("own", [SITE, *(f"usr/lib/python3.13/{name}/" for name in PACKAGES)])
def test_all_that_it_imports_is_compiled_with_its_source(image, own):
    layers = [set(layer) for layer in image.layers]
    for present in layers[1:] if own == SITE else [set().union(*layers)]:
        sources = {name for name in present if name.startswith(own) and name.endswith(".py")}

        assert sources
        assert set() == compiled(sources) - present
