"""What one setting is: its key, where it can come from, its type, bounds and sentence."""

import dataclasses
import math
import re
from collections.abc import Callable

from agent.core.errors import SettingsError, cap

Scalar = str | int | float | bool | None
Value = Scalar | tuple[str, ...]

_TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False"})


class WrongValue(Exception):  # noqa: N818 -- becomes a SettingsError where its place is known
    """A value does not fit its field; str() says what was expected."""


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One setting.

    `key` is its path in the file (`sharing.splitCount`); `read` turns a YAML scalar, or the text of
    a variable or flag, into the value or raises WrongValue. `env` are variable names in order, the
    first one set wins; `flag` is the option of `run`, empty when there is none.
    """

    key: str
    default: Value
    read: Callable[[object], Value]
    text: str
    env: tuple[str, ...] = ()
    flag: str = ""

    @property
    def variables(self) -> tuple[str, ...]:
        """All variable names: the agent's own, then those kept from HAMi and NVIDIA."""
        words = "".join(f"_{c}" if c.isupper() else c for c in self.key.replace(".", "_"))
        return (f"HAMI_AGENT_{words.upper()}", *self.env)


def shown(value: object) -> str:
    """A short form of a refused value for a message."""
    return cap(repr(value), 40)


def text(value: object) -> str:
    """A string."""
    if isinstance(value, str):
        return value
    raise WrongValue(f"expected text, found {shown(value)}")


def optional_text(value: object) -> str | None:
    """A string; an empty one counts as not set."""
    return text(value) or None


def path(value: object) -> str:
    """An absolute path."""
    found = text(value)
    if not found.startswith("/"):
        raise WrongValue(f"expected an absolute path, found {shown(value)}")
    return found


def optional_path(value: object) -> str | None:
    """An absolute path; an empty one counts as not set."""
    return path(value) if text(value) else None


def boolean(value: object) -> bool:
    """True or false; variables and flags may also say 1, 0, t or f."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in _TRUE | _FALSE:
        return value in _TRUE
    raise WrongValue(f"expected true or false, found {shown(value)}")


def whole(low: int, high: int) -> Callable[[object], int]:
    """A whole number from `low` to `high`."""

    def read(value: object) -> int:
        found = value
        if isinstance(found, str):
            sign = found.removeprefix("-")
            found = int(found) if sign.isascii() and sign.isdigit() and len(sign) < 20 else value
        if isinstance(found, bool) or not isinstance(found, int):
            raise WrongValue(f"expected a whole number, found {shown(value)}")
        if not low <= found <= high:
            raise WrongValue(f"expected {low} to {high}, found {found}")
        return found

    return read


def number(low: float, high: float) -> Callable[[object], float]:
    """A finite number from `low` to `high`."""

    def read(value: object) -> float:
        try:
            found = float(value) if isinstance(value, str | int | float) else math.nan
        except ValueError:
            found = math.nan
        if isinstance(value, bool) or not math.isfinite(found):
            raise WrongValue(f"expected a number, found {shown(value)}")
        if not low <= found <= high:
            raise WrongValue(f"expected {low:g} to {high:g}, found {found:g}")
        return found

    return read


def choice(*words: str) -> Callable[[object], str]:
    """One of `words`."""

    def read(value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        raise WrongValue(f"expected one of {', '.join(words)}, found {shown(value)}")

    return read


def texts(value: object) -> tuple[str, ...]:
    """A list of strings; in variables and flags separated by commas."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise WrongValue(f"expected a list of texts, found {shown(value)}")


_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def resource_name(value: object) -> str:
    """An extended resource's name, by the kubelet's rule.

    Source: kubernetes pkg/apis/core/v1/helper IsExtendedResourceName.
    """
    found = text(value)
    domain, slash, name = found.partition("/")
    well_formed = (
        bool(slash)
        and len(domain) <= 244
        and _DOMAIN.fullmatch(domain) is not None
        and _NAME.fullmatch(name) is not None
    )
    if not well_formed or "kubernetes.io/" in found or found.startswith("requests."):
        raise WrongValue(f"expected a name like nvidia.com/gpu, found {shown(value)}")
    return found


def refuse(where: str, key: str, error: WrongValue) -> SettingsError:
    """The error for a value at `where` (file:line, variable or flag)."""
    return SettingsError(f"{where}: {key}: {error}")
