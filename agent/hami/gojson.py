"""Numbers as Go's strconv reads them."""

import re

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
UINT32 = (0, 2**32 - 1)
UINT64 = (0, 2**64 - 1)

_DECIMAL = re.compile(r"([+-]?)0*([0-9]{1,19})")
"""A sign and digits, no space, no underscore; leading zeros apart."""


def parse_int(text: str, bounds: tuple[int, int]) -> int | None:
    """Parse a decimal as Go's ParseInt does; None: it is none, or outside the inclusive bounds."""
    match = _DECIMAL.fullmatch(text)
    value = int(match[1] + match[2]) if match else None
    return value if value is not None and bounds[0] <= value <= bounds[1] else None
