"""Whether a container loads HAMi-core, by what the agent knows of its two files."""

import msgspec
import pytest

from agent.allocate.edits import check_library, misnamed
from agent.errors import Refusal
from agent.ledger import HookFacts
from tests.builders import a_container


def facts(preload: str | None, hook: str = "/usr/local", **more: object) -> HookFacts:
    return msgspec.structs.replace(
        HookFacts(f"{hook}/vgpu/libvgpu.so", hook_path=hook, preload=preload), **more
    )


def refusal(given: HookFacts, *, disabled: bool = False) -> str:
    try:
        check_library(given, a_container(control_disabled=disabled))
    except Refusal as error:
        return str(error)
    return ""


NAMING = [
    "{}",
    "\n\n  {}\t\n",
    "# HAMi-core\n{} # here\n",
    "/usr/lib/libother.so {}\n",
    "/usr/lib/libother.so:{}:/usr/lib/third.so",
    "/opt/old/libvgpu.so\n{}\n",
]
"""Texts by which the loader finds the library, as glibc separates the names."""

OTHERS = [
    ("", "no library"),
    ("# {}\n", "no library"),
    ("{}\r\n", r"libvgpu.so\\r"),
    ("\ufeff{}\n", "ufeff"),
    ("{}.2.10.0\n", "libvgpu.so.2.10.0"),
    ("/x{}\n", "/x/"),
    (".{}\n", "'./"),
    ("/usr/$LIB/vgpu/libvgpu.so\n", r"\$LIB"),
    ("{},/usr/lib/libother.so\n", "libother"),
    ('"{}"\n', '"'),
    ("/usr/lib/libother.so\n{}.new\n", "libother.so' and '"),
]
"""Texts by which it finds none, or another one, and a part of what people are told."""


@pytest.mark.parametrize("hook", ["/usr/local", "/opt/hami", "/"])
@pytest.mark.parametrize("text", NAMING)
def test_a_preload_file_that_names_the_mounted_path_is_right(hook: str, text: str):
    library = f"{hook.rstrip('/')}/vgpu/libvgpu.so"

    assert "" == refusal(facts(text.format(library), hook))


@pytest.mark.parametrize("name", ["/opt//hami/vgpu/libvgpu.so", "//opt/./hami/vgpu/././libvgpu.so"])
def test_another_spelling_of_the_path_is_the_path(name: str):
    assert "" == misnamed(facts(f"{name}\n", "/opt/hami"))
    assert "" == misnamed(facts("/opt/hami/vgpu/libvgpu.so\n", "//opt/hami"))


@pytest.mark.parametrize("hook", ["/usr/local", "/opt/hami"])
@pytest.mark.parametrize(("text", "shown"), OTHERS)
def test_one_that_does_not_is_refused_with_what_it_names(hook: str, text: str, shown: str):
    library = f"{hook}/vgpu/libvgpu.so"
    told = refusal(facts(text.format(library), hook))

    assert told.endswith(f"ask the operator to make {library} its only line. [HA-5005]")
    assert shown.replace("\\\\", "\\").replace(r"\$", "$") in told
    assert told.isprintable()


def test_a_library_that_the_loader_would_ignore_is_refused():
    told = refusal(facts("/usr/local/vgpu/libvgpu.so", loadable=False))

    assert "/usr/local/vgpu/libvgpu.so is empty or no library for this machine" in told
    assert "no limit would be enforced" in told


def test_a_container_that_wants_no_hami_core_needs_only_what_it_mounts():
    """It mounts no ld.so.preload, so it loads nothing; a missing library is still in its way."""
    assert "" == refusal(facts("", loadable=False), disabled=True)
    assert "" == refusal(facts("", missing=("/usr/local/vgpu/ld.so.preload",)), disabled=True)
    assert refusal(facts("", missing=("/usr/local/vgpu/libvgpu.so",)), disabled=True)
