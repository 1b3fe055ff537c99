"""A gRPC connection to a unix socket whose server can end at any moment."""

from grpclib.client import Channel
from grpclib.protocol import H2Protocol
from typing_extensions import override


class UnixChannel(Channel):
    """A Channel that says so when its connection was lost before its first word.

    grpclib would go on with what is left of the connection, and raise AttributeError.
    """

    @override
    async def __connect__(self) -> H2Protocol:
        """The connection, opened if there is none. Raises OSError: there can be none."""
        protocol = await super().__connect__()
        if not self._connected:
            raise ConnectionResetError("the connection was lost while it was opened")
        return protocol
