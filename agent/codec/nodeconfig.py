"""HAMi's node config, `config.json`: overrides for nodes by their names.

Read by the rules of Go's encoding/json: keys in any case, unknown keys ignored, and one value of
the wrong type refuses the whole text.
Source: HAMi v2.10, the device plugin's /config/config.json, key `nodeconfig`.
"""

import math
from collections.abc import Mapping

from agent.codec import gojson
from agent.core.errors import MalformedText

WHAT = "nodeconfig"


def decode_nodeconfig(text: str) -> tuple[Mapping[str, object], ...]:
    """The entries in their order, each with the known keys that it has, in lower case.

    Raises:
        MalformedText: no JSON object, or a value of another type or range.
    """
    entries = gojson.fields(gojson.decode(text, WHAT), _FILE, WHAT)
    found: tuple[Mapping[str, object], ...] = entries.get(WHAT, ())
    return found


def _number(value: object, where: str) -> float:
    """Reads a number; what is too great for 64 bits is none to Go."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) == math.inf:
        raise MalformedText(f"{where} is not a number")
    return value


def _named(readers: Mapping[str, gojson.Reader]) -> gojson.Table:
    return {key: (key, read) for key, read in readers.items()}


_FILTER = _named(
    {
        "uuid": gojson.array(gojson.text),
        "index": gojson.array(gojson.integer(gojson.UINT64)),
    }
)
_ENTRY = _named(
    {
        "name": gojson.text,
        "operatingmode": gojson.text,
        "devicesplitcount": gojson.integer(gojson.UINT64),
        "devicememoryscaling": _number,
        "devicecorescaling": _number,
        "preconfigureddevicememory": gojson.integer(gojson.INT64),
        "libcudaloglevel": gojson.text,
        "enablenumatopology": gojson.flag,
        "filterdevices": lambda value, where: gojson.fields(value, _FILTER, where),
        "migstrategy": gojson.text,
        "enablegetpreferredallocation": gojson.flag,
    }
)
_FILE = _named({WHAT: gojson.array(lambda item, where: gojson.fields(item, _ENTRY, where))})
