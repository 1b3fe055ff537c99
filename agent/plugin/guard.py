"""The outermost handler: every call ends in an answer, or in a status with a message."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import structlog
from grpclib import GRPCError
from grpclib.const import Status
from grpclib.server import Stream

from agent.core.errors import AgentError, Refusal, RefusalReason
from agent.plugin.status import grpc_error
from agent.plugin.traffic import Traffic

log = structlog.get_logger(__name__)

RECEIVE_DEADLINE = 10.0
"""Seconds that a peer has to send its complete request."""

Serve: TypeAlias = Callable[[Stream[Any, Any]], Awaitable[None]]


class Guard:
    """Turns handlers of messages into handlers of grpclib's streams."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def unary(self, method: str, answer: Callable[[Any], Awaitable[Any]]) -> Serve:
        """The handler of one request with one answer."""

        async def serve(stream: Stream[Any, Any]) -> None:
            async def work() -> None:
                message = await answer(await _received(stream))
                await stream.send_message(message)

            await self._guarded(method, work, timed=True)

        return serve

    def stream(self, method: str, answers: Callable[[Any], AsyncGenerator[Any, None]]) -> Serve:
        """The handler of one request with many answers; the generator is closed at its end."""

        async def serve(stream: Stream[Any, Any]) -> None:
            async def work() -> None:
                async with aclosing(answers(await _received(stream))) as messages:
                    async for message in messages:
                        await stream.send_message(message)

            await self._guarded(method, work, timed=False)

        return serve

    async def _guarded(
        self, method: str, work: Callable[[], Awaitable[None]], *, timed: bool
    ) -> None:
        started = asyncio.get_running_loop().time()
        status = Status.CANCELLED
        try:
            await work()
            status = Status.OK
        except GRPCError as error:
            status = error.status
            raise
        except AgentError as error:
            answer = grpc_error(error)
            status = answer.status
            raise answer from error
        except Exception as error:  # the outermost handler
            status = Status.INTERNAL
            log.exception("plugin.call_failed", method=method)
            text = f"{method} failed in the agent ({type(error).__name__}); its log has the trace"
            raise GRPCError(status, text) from error
        finally:
            self._traffic.ended(method, status.name, started, timed=timed)


async def _received(stream: Stream[Any, Any]) -> Any:  # noqa: ANN401 -- any request
    """Receive the request of a call, which the codec refuses if it is malformed."""
    try:
        async with asyncio.timeout(RECEIVE_DEADLINE):
            message = await stream.recv_message()
    except TimeoutError as error:
        raise GRPCError(Status.DEADLINE_EXCEEDED, "the request is incomplete") from error
    except NotImplementedError as error:
        text = "compressed messages are not supported: send them uncompressed"
        raise GRPCError(Status.UNIMPLEMENTED, text) from error
    except AssertionError as error:  # grpclib: the body is shorter than its prefix says
        sentence = "The call ends before the length that it states."
        raise Refusal(RefusalReason.MALFORMED_REQUEST, sentence) from error
    if message is None:
        raise Refusal(RefusalReason.MALFORMED_REQUEST, "The call holds no message.")
    return message
