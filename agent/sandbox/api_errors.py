"""The API server's refusals: one class for each reason of a Status object."""

from collections.abc import Mapping
from typing import Any, ClassVar

Json = dict[str, Any]
"""A plain JSON object, as stored and as sent."""


class StatusError(Exception):
    """A refusal of the API server; `message` is the text of the Status object."""

    code: ClassVar[int] = 500
    reason: ClassVar[str] = "InternalError"

    def __init__(self, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.headers = dict(headers or {})

    def status(self) -> Json:
        """The `Status` object that a client of the real server receives, without its details."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }


class BadRequestError(StatusError):
    """The request cannot be understood."""

    code = 400
    reason = "BadRequest"


class UnauthorizedError(StatusError):
    """No token, or an unknown one."""

    code = 401
    reason = "Unauthorized"


class ForbiddenError(StatusError):
    """A known user without the permission."""

    code = 403
    reason = "Forbidden"


class NotFoundError(StatusError):
    """No such object, or no such path."""

    code = 404
    reason = "NotFound"


class AlreadyExistsError(StatusError):
    """An object of this name already exists."""

    code = 409
    reason = "AlreadyExists"


class ConflictError(StatusError):
    """A precondition (UID or resource version) does not hold."""

    code = 409
    reason = "Conflict"


class GoneError(StatusError):
    """The history no longer has the version that the request names."""

    code = 410
    reason = "Expired"


class InvalidError(StatusError):
    """The result would not be a valid object."""

    code = 422
    reason = "Invalid"


class TooManyRequestsError(StatusError):
    """The server asks the client to try again later."""

    code = 429
    reason = "TooManyRequests"
