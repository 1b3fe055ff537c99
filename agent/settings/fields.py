"""The definition of a setting, and a value of it with its origin."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
from typing_extensions import override

from agent.core.errors import SettingsError
from agent.settings.kinds import Value, ValueType, WrongValue, shown


def as_it_is(value: Value) -> Value:
    """Return the value unchanged: most settings need no conversion."""
    return value


class Field(msgspec.Struct, frozen=True):
    """The definition of one setting.

    `key`: its path in the file (`sharing.splitCount`). `env`: variable names in order; the first
    one that is set wins. `flag`: the option of `run`, empty if there is none. `other_flags`: its
    spellings in HAMi and NVIDIA. `live`: a change takes effect while the agent runs. Profiles may
    set a live setting, unless `profiled` is False. `kept_read` reads the variables of `env` if
    HAMi reads them by another rule.

    `section`: where the agent finds the value: a section's attribute (`web.port`), an attribute of
    Settings itself (`observe`), or several. `part` converts the value for that place. A setting
    without a section is used inside agent/settings only.
    """

    key: str
    default: Value
    read: ValueType
    text: str
    env: tuple[str, ...] = ()
    flag: str = ""
    other_flags: tuple[str, ...] = ()
    live: bool = False
    profiled: bool = True
    kept_read: ValueType | None = None
    section: str | tuple[str, ...] = ()
    part: Callable[..., object] = as_it_is

    @property
    def sections(self) -> tuple[str, ...]:
        """`section` as a tuple."""
        return (self.section,) if isinstance(self.section, str) else self.section

    @property
    def variables(self) -> tuple[str, ...]:
        """All variable names: the agent's own, then those of HAMi and NVIDIA."""
        words = "".join(f"_{c}" if c.isupper() else c for c in self.key.replace(".", "_"))
        return (f"HAMI_AGENT_{words.upper()}", *self.env)


class Setting(msgspec.Struct, frozen=True):
    """A value and its origin (`default`, file:line:column, `env NAME` or a flag)."""

    field: Field
    value: Value
    origin: str


DEFAULT: Final = "default"
"""The origin of a value that no source sets."""


class Values(Mapping[str, Setting]):
    """All settings of one node, by key. `profiles`: the names of the profiles that apply."""

    def __init__(self, settings: Mapping[str, Setting], profiles: tuple[str, ...] = ()) -> None:
        self._settings = settings
        self.profiles = profiles

    @override
    def __getitem__(self, key: str) -> Setting:
        return self._settings[key]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    @override
    def __len__(self) -> int:
        return len(self._settings)


def setting(field: Field, value: object, where: str, written: str = "") -> Setting:
    """Read `value` from `where` (file:line:column, variable or flag) as a setting.

    `written`: the value as the source writes it, for a message.

    Raises:
        SettingsError: the value does not fit.
    """
    try:
        return Setting(field, field.read(value), where)
    except WrongValue as error:
        found = error.found or written or shown(value)
        raise SettingsError(f"{where}: {field.key}: {error}, found {found}") from error
