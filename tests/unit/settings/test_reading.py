"""Where a setting comes from: defaults, the file, the environment, flags; later wins."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.allocate.plain import PlainSettings
from agent.allocate.room import RequestRules
from agent.errors import SettingsError
from agent.settings.fields import Values
from agent.settings.sections import build
from agent.settings.sources import NodeFacts, Sources
from agent.settings.table import FIELDS
from tests.fakes.settings_files import load


@pytest.fixture
def write(tmp_path: Path) -> object:
    def write_file(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write_file


def loaded(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Values:
    return load(Sources(file, environ or {}, flags or {})).resolve(NodeFacts())


def refused(file: Path, *parts: str) -> None:
    with pytest.raises(SettingsError) as caught:
        loaded(file)
    for part in parts:
        assert part in str(caught.value)


def test_a_file_of_junk_is_refused_by_its_size(write) -> None:
    refused(write("x: " + "y" * 300_000), "larger than 256 KiB")


def test_a_named_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "none.yaml", "cannot be read", "No such file")


def test_the_node_is_named_after_the_host_where_nothing_says_otherwise() -> None:
    assert build(loaded(), host_name="bare-7").node == "bare-7"


def test_every_default_passes_its_own_field() -> None:
    for field in FIELDS:
        if field.default is not None:
            value = list(field.default) if isinstance(field.default, tuple) else field.default
            assert field.read(value) == field.default


def test_no_two_settings_share_a_key_a_flag_or_a_variable() -> None:
    for names in (
        [field.key for field in FIELDS],
        [flag for field in FIELDS if field.flag for flag in (field.flag, *field.other_flags)],
        [name for field in FIELDS for name in field.variables],
    ):
        assert len(set(names)) == len(names)


def test_plain_mode_has_limits_only_where_they_are_wanted(write) -> None:
    plain = build(loaded(write("scheduler: none")), host_name="here").plain
    limited = build(
        loaded(write("plain:\n  memoryLimits: true\n"), environ={"HAMI_AGENT_SCHEDULER": "none"}),
        host_name="here",
    ).plain

    assert (PlainSettings(), PlainSettings(memory_limits=True)) == (plain, limited)
    assert None is build(loaded(), host_name="here").plain


def test_the_operating_mode_is_registered_and_answered_in(write) -> None:
    plain = build(loaded(), host_name="here")
    path = write("sharing: {operatingMode: mps}\nallocation: {mpsRoot: ''}\n")
    without = build(loaded(path), host_name="here")
    with_root = build(loaded(path, {"MPS_ROOT": "/run/nvidia/mps"}), host_name="here")

    assert ("hami-core", "hami-core") == (plain.sharing.mode, plain.edits.mode)
    assert ("mps", "mps", "") == (without.sharing.mode, without.edits.mode, without.edits.mps_root)
    assert "/run/nvidia/mps" == with_root.edits.mps_root
    assert with_root.sharing.resource == with_root.edits.resource


@pytest.fixture
def hami_files(tmp_path: Path) -> tuple[Path, Path]:
    devices, nodes = tmp_path / "d.yaml", tmp_path / "n.json"
    devices.write_text("nvidia: {deviceSplitCount: 2, deviceMemoryScaling: 1.5}")
    nodes.write_text('{"nodeconfig":[{"name":"n1","devicesplitcount":3}]}')
    return devices, nodes


def count_on(node: str, sources: Sources) -> object:
    return load(sources).resolve(NodeFacts(node))["sharing.splitCount"].value


def test_hamis_files_are_named_by_flags(hami_files) -> None:
    devices, nodes = hami_files
    sources = Sources(None, {}, {"--device-config": str(devices), "--nodeconfig": str(nodes)})

    assert (3, 2) == (count_on("n1", sources), count_on("n2", sources))


def test_hamis_variable_names_its_file(hami_files) -> None:
    assert 2 == count_on("n1", Sources(None, {"CONFIG_FILE": str(hami_files[0])}, {}))


def test_our_own_file_says_where_hamis_are_and_wins_over_the_one_for_all_nodes(
    write, hami_files
) -> None:
    devices, nodes = hami_files
    own = write(
        f"files: {{deviceConfig: {devices}, nodeConfig: {nodes}}}\nsharing: {{splitCount: 9}}"
    )

    assert (3, 9) == (count_on("n1", Sources(own, {}, {})), count_on("n2", Sources(own, {}, {})))


def test_a_file_of_hamis_that_is_named_and_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.yaml: cannot be read: No such file"):
        load(Sources(None, {"CONFIG_FILE": str(tmp_path / "none.yaml")}, {}))


def test_an_empty_name_is_no_file(write) -> None:
    assert 10 == count_on("n1", Sources(write("files: {nodeConfig: ''}"), {"CONFIG_FILE": ""}, {}))


@pytest.mark.parametrize("flag", ["--device-config", "--nodeconfig"])
def test_a_mebibyte_of_junk_is_refused(tmp_path: Path, flag: str) -> None:
    junk = tmp_path / "junk"
    junk.write_bytes(b"[{x: y\x00\xff" * (1024 * 1024 // 9 + 1))

    with pytest.raises(SettingsError, match=r"junk:(1:)? (is larger than|is not UTF-8|not valid)"):
        load(Sources(None, {}, {flag: str(junk)}))


def test_gpus_in_mode_mig_are_no_reason_to_refuse_the_settings(write) -> None:
    settings = build(loaded(write("sharing: {operatingMode: mig}")), host_name="n")
    assert "mig" == settings.sharing.mode


def test_a_list_that_the_kubelet_would_not_take_is_refused_with_the_arithmetic(write) -> None:
    path = write("sharing: {splitCount: 9000}")

    assert 9000 == build(loaded(path), host_name="n", gpus=6).sharing.split_count
    with pytest.raises(SettingsError) as caught:
        build(loaded(path), host_name="n", gpus=8)
    assert (
        f"{path}:1:23: sharing.splitCount: 8 GPUs x 9000 slices x 66 bytes are a list of 4.5 MiB, "
        "and 3.5 MiB is the most; set it to 6950 or less"
    ) == str(caught.value)


def test_what_is_set_reaches_the_parts_that_use_it() -> None:
    environ = {
        "HAMI_AGENT_SHARING_MEMORY_RESOURCE_NAME": "a.com/mem",
        "HAMI_AGENT_SHARING_NUMA_TOPOLOGY": "false",
        "HAMI_AGENT_SHARING_OPERATING_MODE": "mps",
        "HAMI_AGENT_LIBRARY_CORE_POLICY": "force",
        "HAMI_AGENT_REPORT_PROFILE": "colon",
    }
    settings = build(loaded(None, environ), host_name="n")

    assert RequestRules(memory="a.com/mem") == settings.match.requests
    assert not settings.sharing.numa_topology
    assert ("mps", "mps") == (settings.sharing.mode, settings.edits.mode)
    assert "force" == settings.edits.core_policy
    assert "colon" == settings.report.profile
