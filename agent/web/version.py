"""The page `/version`."""

import dataclasses

import msgspec
from aiohttp import web


@dataclasses.dataclass(frozen=True, slots=True)
class BuildInfo:
    """The versions of the agent, of Python and of the state file, and the report profile.

    `revision` is the agent's commit, empty if unknown.
    """

    version: str
    python: str
    revision: str = ""
    schema: str = ""
    profile: str = "json"

    def page(self, _request: web.BaseRequest) -> web.Response:
        """Answer `/version`."""
        return web.Response(body=msgspec.json.encode(self), content_type="application/json")
