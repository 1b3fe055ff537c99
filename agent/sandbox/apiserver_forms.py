"""The forms of an answer: whole objects, metadata only, compressed.

Source: apiserver/pkg/endpoints/handlers/response.go and .../responsewriters/writers.go of 1.36.
"""

import gzip
import json
from collections.abc import Mapping
from typing import Final

from aiohttp import web

from agent.sandbox.api_errors import Json, NotAcceptableError

PARTIAL: Final = "PartialObjectMetadata"
PARTIAL_LIST: Final = "PartialObjectMetadataList"
META: Final = "meta.k8s.io/v1"
PACKED_FROM: Final = 128 * 1024
"""The least bytes of an answer that is compressed for a client that accepts gzip."""

_TYPES: Final = frozenset({"application/json", "application/*", "*/*"})
_JSON: Final = "application/json"
_NO_HEADERS: Final[Mapping[str, str]] = {}


def form_of(accept: str) -> str:
    """The form that an Accept header requests: `PARTIAL`, `PARTIAL_LIST`, or "" for whole objects.

    Raises:
        NotAcceptableError: the header names no form that is served.
    """
    for offer in (accept or "*/*").split(","):
        kind, *parameters = (part.strip() for part in offer.split(";"))
        given = dict(parameter.partition("=")[::2] for parameter in parameters)
        form = given.get("as", "")
        is_served = not form or (form in (PARTIAL, PARTIAL_LIST) and _is_meta(given))
        if kind in _TYPES and is_served:
            return form
    raise NotAcceptableError(f"only the following media types are accepted: {_JSON}")


def shaped(form: str, answer: Json) -> Json:
    """The answer in that form; a list stays a list.

    Raises:
        NotAcceptableError: the form is of one object and the answer is a list, or the reverse.
    """
    kind = answer["kind"]
    if not form or kind == "Status":
        return answer
    if form == PARTIAL_LIST:
        if "items" not in answer:
            raise NotAcceptableError(_mismatch(form, f"not a list (*core.{kind})"))
        items = [_partial(item) for item in answer["items"]]
        return {
            "kind": PARTIAL_LIST,
            "apiVersion": META,
            "metadata": answer["metadata"],
            "items": items,
        }
    if "items" in answer:
        raise NotAcceptableError(_mismatch(form, f"a list (*core.{kind})"))
    return _partial(answer)


def packed(
    code: int, answer: Json, accept_encoding: str, headers: Mapping[str, str] = _NO_HEADERS
) -> web.Response:
    """The HTTP answer. A long one is compressed if the client accepts gzip."""
    body = json.dumps(answer, separators=(",", ":")).encode()
    more = dict(headers) | {"Content-Type": _JSON}
    if len(body) > PACKED_FROM and "gzip" in accept_encoding:
        body = gzip.compress(body, compresslevel=1, mtime=0)
        more |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return web.Response(status=code, body=body, headers=more)


def _is_meta(given: Mapping[str, str]) -> bool:
    return (given.get("g"), given.get("v")) == ("meta.k8s.io", "v1")


def _partial(answer: Json) -> Json:
    return {"kind": PARTIAL, "apiVersion": META, "metadata": answer["metadata"]}


def _mismatch(form: str, what: str) -> str:
    return f"you requested {form}, but the requested object is {what}"
