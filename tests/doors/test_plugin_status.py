"""One table from errors to gRPC statuses: what surfaces in pods' statuses does not drift."""

import pytest
from grpclib.const import Status

from agent.core.errors import (
    AgentError,
    ApiError,
    GpuError,
    KubeletError,
    MalformedText,
    Refusal,
    RefusalReason,
    StateCorrupt,
    StateError,
)
from agent.plugin.status import grpc_error, status_of

INVALID = {RefusalReason.EMPTY_REQUEST, RefusalReason.MALFORMED_REQUEST}


@pytest.mark.parametrize("gate", RefusalReason)
@pytest.mark.parametrize("transient", [False, True])
def test_every_gate_has_the_status_that_its_kind_deserves(gate: RefusalReason, *, transient: bool):
    usual = Status.UNAVAILABLE if transient else Status.FAILED_PRECONDITION
    expected = Status.INVALID_ARGUMENT if gate in INVALID else usual

    error = grpc_error(Refusal(gate, "this is why", transient=transient))

    assert (expected, f"this is why [{gate.value}]") == (error.status, error.message)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StateError("full"), Status.UNAVAILABLE),
        (StateCorrupt("torn"), Status.UNAVAILABLE),
        (AgentError("other"), Status.INTERNAL),
        (KubeletError("gone"), Status.INTERNAL),
        (ApiError("down"), Status.INTERNAL),
        (GpuError("GPU-1", "silent"), Status.INTERNAL),
        (MalformedText("odd"), Status.INTERNAL),
    ],
)
def test_other_errors_are_internal_but_for_an_unwritable_state(error: AgentError, expected: Status):
    assert expected == status_of(error)
    assert str(error) == grpc_error(error).message
