"""Whether a container loads HAMi-core, by what the agent knows of its two files."""

import ast

import msgspec
import pytest

from agent.allocate.edits import check_library, misnamed
from agent.errors import Refusal
from agent.ledger import HookFacts
from tests.builders import a_container
from tests.unit.rows import rows_of


def facts(preload: str | None, hook: str = "/usr/local", **more: object) -> HookFacts:
    return msgspec.structs.replace(
        HookFacts(f"{hook.rstrip('/')}/vgpu/libvgpu.so", hook_path=hook, preload=preload), **more
    )


def refusal(given: HookFacts, *, disabled: bool = False) -> str:
    try:
        check_library(given, a_container(control_disabled=disabled))
    except Refusal as error:
        return str(error)
    return ""


@pytest.mark.parametrize("hook", ["/usr/local", "/opt/hami", "/"])
@pytest.mark.parametrize(("text", "named"), rows_of(__file__, "preloads.txt"))
def test_a_preload_file_names_the_mounted_path_or_is_refused_with_what_it_names(hook, text, named):
    library = f"{hook.rstrip('/')}/vgpu/libvgpu.so"
    content = ast.literal_eval(f"'{text}'").format(library)
    told = refusal(facts(content, hook))
    if named == "the library":
        assert "" == told
        return
    assert told.endswith(f"{library} its only line. [HA-5005]")
    assert named in told
    assert told.isprintable()


@pytest.mark.parametrize("name", ["/opt//hami/vgpu/libvgpu.so", "//opt/./hami/vgpu/././libvgpu.so"])
def test_another_spelling_of_the_path_is_the_path(name: str):
    assert "" == misnamed(facts(f"{name}\n", "/opt/hami"))
    assert "" == misnamed(facts("/opt/hami/vgpu/libvgpu.so\n", "//opt/hami"))


def test_a_library_that_the_loader_would_ignore_is_refused():
    told = refusal(facts("/usr/local/vgpu/libvgpu.so", loadable=False))

    assert "/usr/local/vgpu/libvgpu.so is empty or no library for this machine" in told
    assert "no limit would be enforced" in told


def test_a_container_that_wants_no_hami_core_needs_only_what_it_mounts():
    """It mounts no ld.so.preload, so it loads nothing; a missing library is still in its way."""
    assert "" == refusal(facts("", loadable=False), disabled=True)
    assert "" == refusal(facts("", missing=("/usr/local/vgpu/ld.so.preload",)), disabled=True)
    assert refusal(facts("", missing=("/usr/local/vgpu/libvgpu.so",)), disabled=True)
