"""The sources of settings: files as they were read, environment, flags; and what one of them says.

Order, later wins: defaults, HAMi's device-config.yaml, our own file, its profiles in their order,
HAMi's config.json for this node, the environment, flags.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from agent.core.state.last_good import SourceFile
from agent.settings.fields import Setting
from agent.settings.profiles import SettingsProfile


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """Where settings come from. A file that is not there, or was not read yet, is None.

    `flags` holds the options that were given, by their name. `file` is our own one by its path;
    None: the default file, if it is there. `host` is the host's name.
    """

    file: Path | None = None
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    host: str = ""
    device_config: SourceFile | None = None
    own: SourceFile | None = None
    node_config: SourceFile | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """What one source says: of all nodes, of some, and what was passed over in it."""

    settings: tuple[Setting, ...] = ()
    profiles: tuple[SettingsProfile, ...] = ()
    warnings: tuple[str, ...] = ()
