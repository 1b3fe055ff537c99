"""HAMi's device-config.yaml: every key of the section, by the rules of the reader it has there."""

import pytest

from agent.errors import SettingsError
from agent.settings.hami import read_device_config
from agent.settings.sources import Faults

CHART = """
nvidia:
  resourceCountName: nvidia.com/gpu
  resourceMemoryName: nvidia.com/gpumem
  resourceMemoryPercentageName: nvidia.com/gpumem-percentage
  resourceCoreName: nvidia.com/gpucores
  resourcePriorityName: nvidia.com/priority
  overwriteEnv: false
  defaultMemory: 0
  defaultCores: 0
  defaultGPUNum: 1
  memoryFactor: 1
  deviceSplitCount: 10
  deviceMemoryScaling: 1
  deviceCoreScaling: 1
  preConfiguredDeviceMemory: 0
  libCudaLogLevel: 1
  enableNumaTopology: false
  disableCoreLimit: false
  gpuCorePolicy: default
  runtimeClassName: ""
  migProfileAllowlist:
    - models: ["A30"]
      profiles: ["1g.6gb", "2g.12gb"]
  knownMigGeometries:
    - models: ["A30"]
      allowedGeometries:
        - - name: 1g.6gb
            core: 25
            memory: 6144
            count: 4
        -
          - {name: 4g.24gb, core: 100, memory: 24576, count: 1}
cambricon:
  resourceCountName: 7
"""


def read(text: str):
    faults = Faults()
    found, warnings = read_device_config(text.encode(), "d.yaml", faults)
    faults.refuse()
    return {one.key: one.value for one in found}, warnings


def refusal(text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        read(text)
    return str(caught.value)


def test_every_key_of_the_chart_is_known():
    found, warnings = read(CHART)

    assert () == warnings
    assert 21 == len(found)
    assert ("1", 10, 1, False) == (
        found["libCudaLogLevel"],
        found["deviceSplitCount"],
        found["deviceMemoryScaling"],
        found["overwriteEnv"],
    )
    assert ({"models": ("A30",), "profiles": ("1g.6gb", "2g.12gb")},) == (
        found["migProfileAllowlist"]
    )
    (geometry,) = found["knownMigGeometries"]
    assert 2 == len(geometry["allowedGeometries"])


def test_an_unknown_key_is_a_warning():
    found, warnings = read("nvidia:\n  deviceSplitCuont: 3\n  defaultCores: 5\n")

    assert {"defaultCores": 5} == found
    assert ("d.yaml:2:3: nvidia: unknown key `deviceSplitCuont`",) == warnings


def test_an_unknown_key_far_below_is_told_too():
    _, warnings = read("nvidia: {migProfileAllowlist: [{models: [], x: 1}]}")
    assert ("d.yaml:1:45: nvidia.migProfileAllowlist[0]: unknown key `x`",) == warnings


@pytest.mark.parametrize("text", ["", "nvidia:", "cambricon: {}"])
def test_a_file_without_the_section_says_so(text: str):
    assert ({}, ("d.yaml: there is no section nvidia; nothing is taken",)) == read(text)


def test_null_is_as_good_as_absent():
    """Go's nil pointers, on which HAMi's plugin crashes."""
    found, _ = read("nvidia: {deviceSplitCount: , deviceMemoryScaling: null, libCudaLogLevel: ~}")
    assert {} == found


def test_a_whole_number_that_helm_wrote_with_an_exponent_is_whole():
    assert 131072 == read("nvidia: {preConfiguredDeviceMemory: 1.31072e+05}")[0].popitem()[1]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("deviceSplitCount: 1e1", 10),
        ("deviceSplitCount: 1e+01", 10),
        ("deviceSplitCount: 1E1", 10),
        ("deviceSplitCount: +1_0", 10),
        ("deviceSplitCount: 0x1F", 31),
        ("deviceSplitCount: 0b11", 3),
        ("deviceSplitCount: 0o17", 15),
        ("deviceSplitCount: 017", 15),
        ("deviceSplitCount: 08", 8),
        ("deviceSplitCount: 00", 0),
        ("deviceSplitCount: !!int '7'", 7),
        ("deviceSplitCount: 18446744073709551615", 2**64 - 1),
        ("preConfiguredDeviceMemory: 1e+06", 1_000_000),
        ("preConfiguredDeviceMemory: -0x1F", -31),
        ("deviceMemoryScaling: 1.5e0", 1.5),
        ("deviceMemoryScaling: 1e1", 10.0),
        ("deviceMemoryScaling: .5", 0.5),
        ("deviceMemoryScaling: .1_5", 0.15),
        ("deviceMemoryScaling: +5.", 5.0),
        ("deviceMemoryScaling: !!float 2", 2.0),
        ("overwriteEnv: y", True),
        ("overwriteEnv: On", True),
        ("overwriteEnv: N", False),
        ("enableNumaTopology: off", False),
        ("gpuCorePolicy: y", "y"),
        ("gpuCorePolicy: 1e+06", "1e+06"),
        ("gpuCorePolicy: 2001-01-01", "2001-01-01"),
        ("libCudaLogLevel: ''", ""),
        ("migProfileAllowlist: [null, {models: [~, 1e1]}]", ({}, {"models": ("", "1e1")})),
        ("1: x\n  y: z\n  overwriteEnv: true", True),
    ],
)
def test_a_scalar_is_what_hamis_reader_takes_it_for(line: str, value: object):
    """Each was read by yaml.v2 v2.4.0 into HAMi's types."""
    (found,) = read(f"nvidia:\n  {line}\n")[0].values()
    assert (type(value), value) == (type(found), found)
