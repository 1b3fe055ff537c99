"""Turns failed requests to the API server into the agent's errors."""

from collections.abc import Mapping

import msgspec

from agent.core.errors import (
    ApiConflict,
    ApiError,
    ApiForbidden,
    ApiGone,
    ApiInvalid,
    ApiNotFound,
    ApiThrottled,
    cap,
)

CLASSES: Mapping[int, type[ApiError]] = {
    401: ApiForbidden,
    403: ApiForbidden,
    404: ApiNotFound,
    409: ApiConflict,
    410: ApiGone,
    422: ApiInvalid,
    429: ApiThrottled,
}
REMEDIES: Mapping[int, str] = {
    401: "; renew the credentials of this node's identity",
    403: "; grant this right to the agent's identity",
}
LONGEST_RETRY_AFTER = 3600.0


def refused(what: str, status: int, body: bytes = b"", retry_after: str | None = None) -> ApiError:
    """The error for an answer with `status`; `what` is the request, like `patch nodes node-a`."""
    return _error(what, status, _message(body), seconds(retry_after))


def error_frame(what: str, obj: Mapping[str, object]) -> ApiError:
    """The error for an ERROR frame of a watch, whose object `obj` is a Status."""
    code = obj.get("code")
    message = obj.get("message")
    status = code if isinstance(code, int) else 0
    return _error(what, status, message if isinstance(message, str) else "", None)


def unanswered(what: str, error: BaseException, where: str) -> ApiError:
    """The error for a request without an answer; `where` describes the connection."""
    reason = cap(str(error) or type(error).__name__, 160)
    return ApiError(f"{what}: no answer from the API server ({reason}); reached through {where}")


def seconds(text: str | None) -> float | None:
    """Retry-After in seconds, at most 3600; None for its date form and for anything else."""
    if text is None or not text.strip().isascii() or not text.strip().isdigit():
        return None
    return min(float(text), LONGEST_RETRY_AFTER)


def _error(what: str, status: int, message: str, retry_after: float | None) -> ApiError:
    text = f"{what}: the API server answered {status}"
    if message:
        text = f"{text}: {cap(message)}"
    kind = CLASSES.get(status, ApiError)
    return kind(text + REMEDIES.get(status, ""), status=status, retry_after=retry_after)


def _message(body: bytes) -> str:
    try:
        answer: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return cap(body[:1024].decode(errors="replace"))
    message = answer.get("message") if isinstance(answer, dict) else None
    return message if isinstance(message, str) else ""
