"""The client of the kubelet's Registration service: each call opens one short connection."""

import asyncio
from pathlib import Path

from grpclib import GRPCError
from grpclib.exceptions import ProtocolError, StreamTerminatedError

from agent.core.errors import KubeletError, RegistrationRefused, cap
from agent.kit.tasks import apart
from agent.kit.unix import UnixChannel
from agent.wire.v1beta1 import DevicePluginOptions, RegisterRequest, RegistrationStub

API_VERSION = "v1beta1"

REGISTER_DEADLINE = 15.0
"""Seconds: during the call the kubelet connects to the plugin, for which it allows 10 s."""


class KubeletRegistrar:
    """The Registrar port over the kubelet's unix socket.

    `fenced`: the kubelet shall call PreStartContainer before each container start.
    """

    def __init__(
        self, socket: Path, *, fenced: bool = False, deadline: float = REGISTER_DEADLINE
    ) -> None:
        self._socket = socket
        self._fenced = fenced
        self._deadline = deadline

    async def register(self, endpoint: str, resource: str, *, preferred: bool) -> None:
        """Register the socket named `endpoint`, with the options of GetDevicePluginOptions.

        Raises:
            RegistrationRefused: the kubelet refused; the text is the kubelet's.
            KubeletError: the kubelet is not there, or did not answer in time.
        """
        request = RegisterRequest(
            version=API_VERSION,
            endpoint=endpoint,
            resource_name=resource,
            options=DevicePluginOptions(
                pre_start_required=self._fenced, get_preferred_allocation_available=preferred
            ),
        )
        try:
            async with (
                asyncio.timeout(self._deadline),
                UnixChannel(path=str(self._socket)) as channel,
            ):
                await apart(RegistrationStub(channel).register(request))
        except GRPCError as error:
            text = error.message or error.status.name
            raise RegistrationRefused(cap(text)) from error
        except FileNotFoundError as error:
            raise KubeletError(f"{self._socket} is not there: is the kubelet running?") from error
        except ConnectionRefusedError as error:
            raise KubeletError(f"{self._socket} refuses connections: no kubelet listens") from error
        except TimeoutError as error:
            text = f"the kubelet did not answer Register within {self._deadline:g} s"
            raise KubeletError(text) from error
        except (OSError, StreamTerminatedError, ProtocolError) as error:
            text = f"the connection to {self._socket} broke: {cap(str(error))}"
            raise KubeletError(text) from error
