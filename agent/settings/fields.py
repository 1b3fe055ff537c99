"""What one setting is, and a value of it with its origin."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from typing_extensions import override

from agent.core.errors import SettingsError
from agent.settings.kinds import Value, ValueType, WrongValue, shown


def as_it_is(value: Value) -> Value:
    """The value of most settings is what the agent uses."""
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One setting.

    `key` is its path in the file (`sharing.splitCount`). `env` are variable names in order, the
    first one that is set wins; `flag` is the option of `run`, empty when there is none, and
    `other_flags` are spellings of it kept from HAMi and NVIDIA. `live`: a change takes effect while
    the agent runs, so that profiles may set it, unless it is not `profiled`: one for all nodes.
    `kept_read` reads the variables of `env` where HAMi reads them by another rule.

    `section` is where the agent finds the value: the section and its attribute (`web.port`), an
    attribute of Settings itself (`observe`), or several; `part` makes of the value what stands
    there. Without one the value steers what is read or built, in agent/settings itself.
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
        """All places of the value."""
        return (self.section,) if isinstance(self.section, str) else self.section

    @property
    def variables(self) -> tuple[str, ...]:
        """All variable names: the agent's own, then those kept from HAMi and NVIDIA."""
        words = "".join(f"_{c}" if c.isupper() else c for c in self.key.replace(".", "_"))
        return (f"HAMI_AGENT_{words.upper()}", *self.env)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it came from (`default`, file:line:column, `env NAME`, a flag)."""

    field: Field
    value: Value
    origin: str


DEFAULT: Final = "default"
"""The origin of a value that nobody set."""


class Values(Mapping[str, Setting]):
    """Every setting by its key, as it is on one node. `profiles`: the names of those that apply."""

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
    """The setting with `value` from `where` (file:line:column, variable or flag).

    `written`: how the value stands there, for a message.

    Raises:
        SettingsError: the value does not fit.
    """
    try:
        return Setting(field, field.read(value), where)
    except WrongValue as error:
        found = error.found or written or shown(value)
        raise SettingsError(f"{where}: {field.key}: {error}, found {found}") from error
