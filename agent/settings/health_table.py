"""Settings of health: times, and classes of XIDs in our form and in NVIDIA's plugin's."""

from collections.abc import Mapping

from agent.core.health.settings import XidSwitches, read_switches
from agent.core.health.xids import XidClass
from agent.settings.fields import Field
from agent.settings.kinds import HOW, ValueType, WrongValue, duration, shown, text, texts

CLASSES = {kind.value: kind for kind in XidClass}
MOST_XID = 65535


def _class_of(item: str) -> tuple[int, XidClass]:
    xid, _, name = (part.strip() for part in item.partition("="))
    is_xid = xid.isascii() and xid.isdigit() and len(xid) < 6 and 0 < int(xid) <= MOST_XID
    if not is_xid or name not in CLASSES:
        words = ", ".join(CLASSES)
        raise WrongValue(f"expected XID=CLASS with one of {words}", shown(item))
    return int(xid), CLASSES[name]


def _xid_classes(value: object) -> tuple[str, ...]:
    found = texts(value)
    items = found if isinstance(found, tuple) else ()
    named = [_class_of(item)[0] for item in items]
    if twice := sorted({xid for xid in named if named.count(xid) > 1}):
        raise WrongValue(f"expected one class for XID {twice[0]}", "more")
    return items


xid_classes = ValueType(
    _xid_classes,
    {
        "type": "array",
        "items": {"type": "string", "pattern": f"^[1-9][0-9]{{0,4}} *= *({'|'.join(CLASSES)})$"},
    },
)
"""A list of texts like `94=fatal`; in variables and flags separated by commas."""


def classes_of(items: tuple[str, ...]) -> Mapping[int, XidClass]:
    """Read `health.xids`: the class of each XID."""
    return dict(map(_class_of, items))


def switches_of(disabled: str, enabled: str) -> XidSwitches:
    """Read `health.disabledXids` and `health.enabledXids`."""
    return read_switches(disabled, enabled)


HEALTH: tuple[Field, ...] = (
    Field(
        "health.driverHang",
        60.0,
        duration(1, 3600),
        f"Time without an answer of the driver after which new pods get none of its GPUs. {HOW}",
        section="health.driver_hang",
    ),
    Field(
        "health.quietPeriod",
        600.0,
        duration(1, 86400),
        "Cool-down: a GPU is ok after this time without a bad report and 3 passed probes. " + HOW,
        section="health.quiet",
    ),
    Field(
        "health.probePeriod",
        10.0,
        duration(0.1, 3600),
        f"Time between probes of a GPU. {HOW}",
        section="health.probe_interval",
    ),
    Field(
        "health.longestQuietPeriod",
        7200.0,
        duration(1, 604800),
        "Longest cool-down. The cool-down of a GPU doubles each time that the GPU becomes bad "
        f"again soon after it recovered. {HOW}",
        section="health.longest_quiet",
    ),
    Field(
        "health.xids",
        (),
        xid_classes,
        "Classes of XIDs that differ from the agent's table, such as 94=fatal: "
        f"{', '.join([*CLASSES][:-1])} or {[*CLASSES][-1]}.",
        section="health.xids",
        part=classes_of,
    ),
    Field(
        "health.disabledXids",
        "",
        text,
        "XIDs to ignore, separated by commas. all or xids: no health checks at all, as in "
        "NVIDIA's plugin. Then a GPU that hangs or fails stays on offer; a lost GPU stays until "
        "the next scan, at most 1 minute.",
        env=("DP_DISABLE_HEALTHCHECKS",),
    ),
    Field(
        "health.enabledXids",
        "",
        text,
        "XIDs to count even if an application causes them or they are disabled; all: every XID.",
        env=("DP_ENABLE_HEALTHCHECKS",),
    ),
)
