"""A gRPC connection to a unix socket whose server can end at any moment."""

from grpclib.client import Channel
from grpclib.protocol import H2Protocol
from typing_extensions import override


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
