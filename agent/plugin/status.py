"""Turns the agent's errors into gRPC statuses.

The pod's status shows the code and text of a refusal, so both are stable.
"""

from grpclib import GRPCError
from grpclib.const import Status

from agent.core.errors import AgentError, Refusal, RefusalReason, StateError, cap

TEXT_LIMIT = 4096
"""Characters of an error's text, which the kubelet copies into the pod's status."""

_MALFORMED = frozenset({RefusalReason.EMPTY_REQUEST, RefusalReason.MALFORMED_REQUEST})


def status_of(error: AgentError) -> Status:
    """The gRPC code for an error."""
    match error:
        case Refusal() if error.gate in _MALFORMED:
            return Status.INVALID_ARGUMENT
        case Refusal() if error.transient:
            return Status.UNAVAILABLE
        case Refusal():
            return Status.FAILED_PRECONDITION
        case StateError():
            return Status.UNAVAILABLE
        case _:
            return Status.INTERNAL


def grpc_error(error: AgentError) -> GRPCError:
    """The gRPC error for an error; its text is one line."""
    return GRPCError(status_of(error), cap(str(error), TEXT_LIMIT))
