"""What runs here."""

import dataclasses

import msgspec
from aiohttp import web


@dataclasses.dataclass(frozen=True, slots=True)
class BuildInfo:
    """Version and revision of the agent, of Python, of its state file, and the scheduler profile.

    `revision` is the commit, empty where unknown. `profile` is the register annotation's form.
    """

    version: str
    python: str
    revision: str = ""
    schema: str = ""
    profile: str = "json"

    def page(self, _request: web.BaseRequest) -> web.Response:
        """`/version`."""
        return web.Response(body=msgspec.json.encode(self), content_type="application/json")
