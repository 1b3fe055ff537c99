"""The page `/version`."""

import msgspec

from agent.web import aiohttp_server as web


class BuildInfo(msgspec.Struct, frozen=True):
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
