"""A gRPC connection to a unix socket whose server can end at any moment."""

import asyncio
import contextlib
from collections.abc import Iterator

from grpclib.client import Channel
from grpclib.protocol import H2Protocol
from typing_extensions import override


@contextlib.contextmanager
def uncancelled() -> Iterator[None]:
    """Leave the task as it was when grpclib ends a call by an error.

    grpclib cancels the task to end a call, raises the error in its place, and lets the cancellation
    count. An outer `asyncio.timeout` then takes its own cancellation for another one's, and raises
    CancelledError: the caller would end without a word. So give a call no `timeout` of grpclib's.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    except Exception:
        while task is not None and task.cancelling() > before:
            task.uncancel()
        raise


class UnixChannel(Channel):
    """A Channel that raises an OSError when its connection is lost while it opens.

    grpclib would use the lost connection and raise AttributeError.
    """

    @override
    async def __connect__(self) -> H2Protocol:
        """Return the open connection, or open one. Raises OSError."""
        protocol = await super().__connect__()
        if not self._connected:
            raise ConnectionResetError("the connection was lost while it was opened")
        return protocol
