"""The devices annotation of a pod: groups of shares, one group for each container.

    pod = { group ";" }    group = { device ":" }    device = UUID "," type "," MiB "," percent

Source: HAMi v2.10 pkg/device/devices.go, DecodePodDevices and EncodePodSingleDevice.
"""

import re
from collections.abc import Collection, Iterator, Sequence

from agent.core.errors import MalformedText, cap
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.share import Share

TYPE_WORD = "NVIDIA"
LENGTH_LIMIT = 64 * 1024
"""Characters: 1,000 shares. A tenant may write four times as many, and every change of the pod
decodes them again."""
GROUP_LIMIT = 256
"""Groups: the kubelet allocates a pod's containers one by one and admits no other pod meanwhile."""
INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)

Groups = tuple[tuple[Share, ...], ...]

_PLACEHOLDER = ["", "", "0", "0"]
_NUMBER = re.compile(r"([+-]?)0*([0-9]{1,10})")
"""Go's ParseInt in base 10: a sign and digits, no space, no underscore; leading zeros apart."""


def decode_pod_devices(text: str, *, type_word: str | None = None) -> Groups:
    """Decode groups of shares in the order of the text; an empty group: a container without GPUs.

    Numbers may be negative, as in HAMi: `validate` refuses them. A text that ends in `;`, as HAMi
    writes it, has an empty last group. The placeholder `,,0,0`, which schedulers 2.4 and 2.5 write
    for a container without GPUs, is skipped; other devices without a UUID stay. HAMi accepts any
    type; this accepts only `type_word` (None: any).

    Raises:
        MalformedText: fewer than four fields, a number outside int32, another type, or more than
            LENGTH_LIMIT characters or GROUP_LIMIT groups.
    """
    if len(text) > LENGTH_LIMIT or text.count(";") > GROUP_LIMIT:
        raise MalformedText(
            f"devices text has {len(text)} characters and {text.count(';')} groups; "
            f"at most {LENGTH_LIMIT} and {GROUP_LIMIT} are read"
        )
    return tuple(
        tuple(_decode_share(piece, place, type_word) for piece in _pieces(part))
        for place, part in enumerate(text.split(";"))
    )


def vendor_words(text: str) -> tuple[tuple[str, ...], ...]:
    """The type of each share of a text that `decode_pod_devices` accepts, in the same shape."""
    return tuple(tuple(piece.split(",")[1] for piece in _pieces(part)) for part in text.split(";"))


def encode_pod_devices(groups: Sequence[Sequence[Share]]) -> str:
    """Encode groups: every device ends with `:`, every group with `;`."""
    return "".join(
        "".join(
            f"{share.uuid},{TYPE_WORD},{share.memory_mib},{share.core_percent}:" for share in group
        )
        + ";"
        for group in groups
    )


def consume(text: str, groups: Collection[int]) -> str:
    """Empty the groups at those positions of `text`; the rest, with all separators, stays.

    Repeating it changes nothing more, and neither does a position beyond the text.
    """
    return ";".join("" if place in groups else part for place, part in enumerate(text.split(";")))


def validate(groups: Groups) -> Groups:
    """Check and return `groups`.

    Raises:
        MalformedText: a share has negative memory or cores, which HAMi's decoder accepts.
    """
    for place, group in enumerate(groups):
        for share in group:
            if share.memory_mib < 0 or share.core_percent < 0:
                raise MalformedText(
                    f"devices text, group {place}: GPU {cap(share.uuid)} has "
                    f"{share.memory_mib} MiB and {share.core_percent} percent; "
                    "neither may be negative"
                )
    return groups


def _pieces(text: str) -> Iterator[str]:
    """The devices of a group; as in HAMi, pieces without a comma are skipped."""
    pieces = (piece for piece in text.split(":") if "," in piece)
    return (piece for piece in pieces if piece.split(",")[:4] != _PLACEHOLDER)


def _decode_share(text: str, place: int, type_word: str | None) -> Share:
    """Decode one device; fields after the fourth are ignored."""
    fields = text.split(",")
    if len(fields) < 4:
        raise MalformedText(
            f"devices text, group {place}: {cap(text)!r} has {len(fields)} of 4 fields "
            "(UUID, type, MiB, percent)"
        )
    uuid, kind, memory, cores = fields[:4]
    if type_word is not None and kind != type_word:
        raise MalformedText(
            f"devices text, group {place}: {cap(uuid, 64)} is of type {cap(kind, 64)!r}; only type "
            f"{type_word} is served here"
        )
    return Share(
        uuid=GpuUuid(uuid),
        memory_mib=_number(memory, place, "memory"),
        core_percent=_number(cores, place, "cores"),
    )


def _number(text: str, place: int, what: str) -> int:
    match = _NUMBER.fullmatch(text)
    value = int(match[1] + match[2]) if match else None
    if value is None or not INT32_MIN <= value <= INT32_MAX:
        raise MalformedText(
            f"devices text, group {place}: {what} {cap(text)!r} is not a decimal of 32 bits"
        )
    return value
