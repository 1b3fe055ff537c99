"""Decodes Kubernetes quantities (`2`, `1k`, `1.5Gi`) to whole numbers.

Source: k8s.io/apimachinery pkg/api/resource, ParseQuantity and Quantity.Value.
"""

import math
import re
from fractions import Fraction

_QUANTITY = re.compile(
    r"([+-]?)([0-9]{1,64}(?:\.[0-9]{0,64})?|\.[0-9]{1,64})(?:([eE][+-]?[0-9]{1,2})|([A-Za-z]{0,2}))"
)
_SUFFIXES = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    **{suffix: Fraction(1000 ** (n + 1)) for n, suffix in enumerate("kMGTPE")},
    **{f"{suffix}i": Fraction(1024 ** (n + 1)) for n, suffix in enumerate("KMGTPE")},
}


def decode_quantity(text: str) -> int | None:
    """Decode a quantity, rounded up as Kubernetes does; None when it is not a quantity."""
    exact = _exact(text)
    return None if exact is None else math.ceil(exact)


def decode_whole(text: str) -> int | None:
    """Decode a whole quantity; None when it is not a quantity, or a fraction.

    An API server rewrites quantities: 3000 becomes `3k`.
    """
    exact = _exact(text)
    return int(exact) if exact is not None and exact.denominator == 1 else None


def _exact(text: str) -> Fraction | None:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    sign, digits, exponent, suffix = match.groups()
    if exponent is None and suffix not in _SUFFIXES:
        return None
    factor = _SUFFIXES[suffix] if exponent is None else Fraction(10) ** int(exponent[1:])
    return Fraction(sign + digits) * factor
