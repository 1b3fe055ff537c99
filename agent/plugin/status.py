"""Which gRPC status an error of ours becomes: one table.

Code and text of a refusal surface in the pod's status, so both are stable.
"""

from grpclib import GRPCError
from grpclib.const import Status

from agent.core.errors import AgentError, Refusal, RefusalReason, StateError, cap

TEXT_LIMIT = 4096
"""Characters of an answer's sentence, which the kubelet copies into the pod's status."""

_MALFORMED = frozenset({RefusalReason.EMPTY_REQUEST, RefusalReason.MALFORMED_REQUEST})


def status_of(error: AgentError) -> Status:
    """The code that tells the kubelet what kind of error it is."""
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
    """The answer that the kubelet gets instead of a message; its text is one line of it."""
    return GRPCError(status_of(error), cap(str(error), TEXT_LIMIT))
