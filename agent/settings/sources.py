"""The sources of settings (files, environment, flags) and the layer that is read from each.

Order, later wins: defaults, HAMi's device-config.yaml, our own file, its profiles in their order,
HAMi's config.json for this node, the environment, flags.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from agent.core.state.last_good import SourceFile
from agent.settings.fields import Setting
from agent.settings.profiles import SettingsProfile


class Sources(msgspec.Struct, frozen=True):
    """The sources of settings. A file that does not exist, or was not read yet, is None.

    `file`: the path of our own file; None: the default file, if it exists. `flags`: the given
    options by name. `host`: the host's name.
    """

    file: Path | None = None
    environ: Mapping[str, str] = msgspec.field(default_factory=dict)
    flags: Mapping[str, str] = msgspec.field(default_factory=dict)
    host: str = ""
    device_config: SourceFile | None = None
    own: SourceFile | None = None
    node_config: SourceFile | None = None


class Layer(msgspec.Struct, frozen=True):
    """What one source sets for all nodes and for some, and warnings about what it ignores."""

    settings: tuple[Setting, ...] = ()
    profiles: tuple[SettingsProfile, ...] = ()
    warnings: tuple[str, ...] = ()
