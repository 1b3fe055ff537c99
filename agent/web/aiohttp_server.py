"""The parts of aiohttp's server in use. All of `aiohttp.web` would take 1.4 MB and 9 ms more."""

from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response, StreamResponse
from aiohttp.web_server import Server

__all__ = ["BaseRequest", "RequestHandler", "Response", "Server", "StreamResponse"]
