"""The errors of the agent. A class exists only if callers react to it in a way of its own."""

import enum
from typing import ClassVar

FOREIGN_TEXT_LIMIT = 256
READ_LIMIT = 64 * 1024  # characters of a foreign text that `cap` looks at


def cut(text: str, limit: int) -> str:
    """Shorten the text to `limit` characters; an ellipsis marks the cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def cap(text: str, limit: int = FOREIGN_TEXT_LIMIT) -> str:
    """Make foreign text safe to show: one line of at most `limit` printable characters.

    An ellipsis marks a cut. U+FFFD replaces each character that is not printable.
    """
    line = cut(" ".join(cut(text, READ_LIMIT).split()), limit)
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def host_port(host: str, port: object) -> str:
    """Both as in a URL: an IPv6 address is in brackets, or its last group would be the port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class AgentError(Exception):
    """Root of every error that the agent raises on purpose. str() is one sentence for people.

    `said`: what is wrong. `remedy`: what to do; str() appends it after a colon.
    """

    exit_code: ClassVar[int] = 70
    """After sysexits. systemd starts the agent again after all of them but SettingsError's."""

    def __init__(self, text: str, *, remedy: str = "") -> None:
        super().__init__(f"{text}: {remedy}" if remedy else text)
        self.said = text
        self.remedy = remedy


class SettingsError(AgentError):
    """A setting cannot be used. The text names file:line, the field and what to do.

    `every`: all errors that were found, one sentence each; the text is the first of them.
    """

    exit_code = 78

    def __init__(self, text: str, *, every: tuple[str, ...] = (), remedy: str = "") -> None:
        super().__init__(text, remedy=remedy)
        self.every = every or (str(self),)


class PermissionFault(AgentError):  # noqa: N818 -- PermissionError is a builtin
    """A path that the agent needs may not be read, written or bound."""

    exit_code = 77


class DirectoryLost(AgentError):  # noqa: N818 -- names what happened
    """The kubelet's directory was replaced, and this process sees the new one read-only."""

    exit_code = 75


class DriverError(AgentError):
    """The driver as a whole did not answer, or answered with an error."""

    exit_code = 69


class DriverMissing(DriverError):  # noqa: N818 -- the state, not the call, is the error
    """There is no usable driver library on this node (yet)."""


class GpuError(AgentError):
    """One GPU did not answer. `gpu` is its UUID, or `index N` where the UUID is unknown."""

    def __init__(self, gpu: str, text: str, *, lost: bool = False) -> None:
        super().__init__(f"GPU {gpu}: {text}")
        self.gpu = gpu
        self.text = text
        self.lost = lost


class StateError(AgentError):
    """The state directory cannot be read or written; the text says which path and why."""

    exit_code = 77


class StateCorrupt(StateError):  # noqa: N818 -- names what was found
    """A stored generation fails its checksum, version or shape."""


class MalformedText(AgentError):  # noqa: N818 -- names what was found
    """An annotation, a lock or a message does not follow its grammar."""


class KubeletError(AgentError):
    """The kubelet cannot be reached or answered with an error."""


class RegistrationRefused(KubeletError):  # noqa: N818 -- names what happened
    """The kubelet answered Register with an error; the text is the kubelet's."""


class WitnessThrottled(KubeletError):  # noqa: N818 -- names what happened
    """PodResources is over its rate limit (burst 10, then 100 a second, for all its clients)."""


class WitnessUnsupported(KubeletError):  # noqa: N818 -- names what happened
    """This kubelet does not serve PodResources Get (kubelet before 1.34)."""


class ApiError(AgentError):
    """The API server answered with an error status (`status`), or not at all (`status` 0)."""

    def __init__(self, text: str, *, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after = retry_after


class ApiNotFound(ApiError):  # noqa: N818 -- the API's word
    """404: the object is not there."""


class ApiConflict(ApiError):  # noqa: N818 -- the API's word
    """409: a precondition (uid, resourceVersion) does not hold."""


class ApiGone(ApiError):  # noqa: N818 -- the API's word
    """410: the watch is too old; list again."""


class ApiInvalid(ApiError):  # noqa: N818 -- the API's word
    """422: the patch cannot be applied, for example because its `test` failed."""


class ApiForbidden(ApiError):  # noqa: N818 -- the API's word
    """401 or 403: the identity may not do this."""


class ApiThrottled(ApiError):  # noqa: N818 -- the API's word
    """429: ask again after `retry_after` seconds."""


class RefusalReason(enum.Enum):
    """Why an Allocate is refused. The value is the id that the runbook explains."""

    EMPTY_REQUEST = "HA-1001"
    MALFORMED_REQUEST = "HA-1002"
    UNKNOWN_SLICE = "HA-1003"
    NO_POD_ADMITTED = "HA-2001"
    MANY_PODS_ADMITTED = "HA-2002"
    POD_DELETED = "HA-2003"
    NO_RIGHT = "HA-2004"
    NO_LOCK = "HA-2005"
    STATIC_POD = "HA-2006"
    WITNESS_SILENT = "HA-2007"
    OVERLAP = "HA-2009"
    PODS_UNKNOWN = "HA-2010"
    NO_ANNOTATION = "HA-3001"
    MALFORMED_ANNOTATION = "HA-3002"
    WRONG_NODE = "HA-3003"
    COUNT_MISMATCH = "HA-3004"
    NO_CONTAINER_LEFT = "HA-3005"
    DROPPED_REQUEST = "HA-3006"
    NOT_AS_REQUESTED = "HA-3007"
    UNKNOWN_GPU = "HA-4001"
    BAD_GPU = "HA-4002"
    MEMORY_EXCEEDED = "HA-4003"
    CORES_EXCEEDED = "HA-4004"
    DRIVER_UNRESPONSIVE = "HA-4005"
    OTHER_GPU_BOOKED = "HA-4006"
    STATE_UNWRITABLE = "HA-5001"
    OUT_OF_TIME = "HA-5002"
    HOST_DIRECTORY = "HA-5003"
    STOPPING = "HA-5004"
    NO_LIBRARY = "HA-5005"
    STARVED = "HA-5006"


class Refusal(AgentError):  # noqa: N818 -- an answer, not a fault
    """An Allocate is answered with an error on purpose.

    `sentence` tells the pod's owner what is wrong and what to do. str() adds the id and appears in
    the pod's status. Transient refusals become UNAVAILABLE, those of a malformed request
    INVALID_ARGUMENT, the others FAILED_PRECONDITION.
    """

    def __init__(self, gate: RefusalReason, sentence: str) -> None:
        super().__init__(f"{sentence} [{gate.value}]")
        self.gate = gate
        self.sentence = sentence
        # It is about a moment, so that the same pod may be served later.
        self.transient = gate.value.startswith("HA-5") or gate in {
            RefusalReason.WITNESS_SILENT,
            RefusalReason.OVERLAP,
            RefusalReason.PODS_UNKNOWN,
            RefusalReason.DRIVER_UNRESPONSIVE,
        }
