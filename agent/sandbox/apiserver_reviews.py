"""SelfSubjectAccessReview: tells a user whether a request would be authorized."""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from agent.sandbox.api_errors import BadRequestError, ForbiddenError, Json
from agent.sandbox.apiserver_access import NotAdmittedError, Target, authorize
from agent.sandbox.apiserver_paths import parse_fields

PATH: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
TARGET: Final = Target("create", "selfsubjectaccessreviews")


def reviewed(user: str, body: bytes, find: Callable[[Target], Json | None]) -> Json:
    """Answer the review in `body`. `find` returns the object that it names, if it exists.

    Raises:
        BadRequestError: the body is not a review of a resource.
    """
    try:
        review: object = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise BadRequestError("the body is no JSON") from error
    asked = _mapping(_mapping(_mapping(review).get("spec")).get("resourceAttributes"))
    if not asked:
        raise BadRequestError("spec.resourceAttributes is all that is reviewed here")
    target = Target(
        _text(asked, "verb"),
        _text(asked, "resource"),
        _text(asked, "namespace"),
        _text(asked, "name"),
        _text(asked, "subresource"),
        parse_fields({"fieldSelector": _text(_mapping(asked.get("fieldSelector")), "rawSelector")}),
    )
    return {**_mapping(review), "status": {"allowed": _is_allowed(user, target, find(target))}}


def _is_allowed(user: str, target: Target, stored: Json | None) -> bool:
    try:
        authorize(user, target, stored)
    except NotAdmittedError:
        return True
    except ForbiddenError:
        return False
    return True


def _text(parent: Mapping[str, object], key: str) -> str:
    return str(parent.get(key) or "")


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
