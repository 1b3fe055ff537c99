"""The API server's refusals: one class for each reason of a Status object."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

Json = dict[str, Any]
"""A plain JSON object, as stored and as sent."""


class StatusError(Exception):
    """A refusal of the API server; `message` is the text of the Status object."""

    code: ClassVar[int] = 500
    reason: ClassVar[str] = "InternalError"

    @override
    def __init_subclass__(cls, *, code: int, reason: str) -> None:
        super().__init_subclass__()
        cls.code, cls.reason = code, reason

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


class BadRequestError(StatusError, code=400, reason="BadRequest"):
    """The request cannot be understood."""


class UnauthorizedError(StatusError, code=401, reason="Unauthorized"):
    """No token, or an unknown one."""


class ForbiddenError(StatusError, code=403, reason="Forbidden"):
    """A known user without the permission."""


class NotFoundError(StatusError, code=404, reason="NotFound"):
    """No such object, or no such path."""


class AlreadyExistsError(StatusError, code=409, reason="AlreadyExists"):
    """An object of this name already exists."""


class ConflictError(StatusError, code=409, reason="Conflict"):
    """A precondition (UID or resource version) does not hold."""


class GoneError(StatusError, code=410, reason="Expired"):
    """The history no longer has the version that the request names."""


class InvalidError(StatusError, code=422, reason="Invalid"):
    """The result would not be a valid object."""


class TooManyRequestsError(StatusError, code=429, reason="TooManyRequests"):
    """The server asks the client to try again later."""
