"""Checks the body of a write, with the error texts of the real server.

It checks the parts that all objects share, and the parts of an Event that an agent can get wrong.
There is no schema, so unknown members stay and no defaults are added.
"""

import json
import re
from typing import Final

from agent.sandbox.api_errors import (
    BadRequestError,
    ConflictError,
    InvalidError,
    Json,
    UnclassifiedError,
)
from agent.sandbox.apiserver_access import Target
from agent.sandbox.store import KINDS

_SUBDOMAIN: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_SUBDOMAIN_TEXT: Final = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used "
    f"for validation is '{_SUBDOMAIN}')"
)
_GO_WORDS: Final = {bool: "bool", dict: "object", list: "array"}
_TOO_LONG: Final = 256 * 1024
"""The most bytes of all annotations of one object, keys and values."""

_OTHER_NAMESPACE: Final = (
    "the namespace of the provided object does not match the namespace sent on the request"
)
_MODIFIED: Final = (
    "the object has been modified; please apply your changes to the latest version and try again"
)
_POD_SPEC: Final = (
    "spec: Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
    "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only "
    "additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set "
    "to 1 if it was previously negative)"
)


def parse_json(body: bytes, failure: str) -> object:
    """Parse a JSON body. `failure` begins the text of the error.

    Raises:
        BadRequestError: it is not JSON.
    """
    try:
        return json.loads(body)
    except ValueError as malformed:
        raise BadRequestError(f"{failure}: {malformed}"[:256]) from malformed


def parse_object(body: bytes, kind: str) -> Json:
    """Parse a JSON object, which must be of `kind` if it names one.

    Raises:
        BadRequestError: it is not a JSON object, or of another kind.
    """
    failure = f"the object provided is unrecognized (must be of type {kind}): couldn't get "
    failure += "version/kind; json parse error"
    value = parse_json(body, failure)
    if not isinstance(value, dict):
        raise BadRequestError(f"{failure}: json: cannot unmarshal into an object"[:256])
    other = value.get("kind", kind)
    if other != kind:
        detail = f"converting (v1.{other}) to (core.{kind}): unknown conversion"
        raise BadRequestError(_unreadable(other, kind, detail))
    return value


def check_new(target: Target, given: Json) -> None:
    """Check an object before it is created.

    Raises:
        BadRequestError, InvalidError, UnclassifiedError: as the real server refuses it.
    """
    kind, metadata = KINDS[target.resource], given["metadata"]
    if metadata.get("namespace", target.namespace) != target.namespace:
        raise BadRequestError(_OTHER_NAMESPACE)
    if metadata.get("resourceVersion"):
        raise UnclassifiedError("resourceVersion should not be set on objects to be created")
    wrong = _wrong_marks(metadata)
    if wrong:
        raise BadRequestError(_unreadable(kind, kind, wrong))
    name = metadata.get("name", "")
    if name and target.resource != "events" and not re.fullmatch(_SUBDOMAIN, name):
        detail = f'metadata.name: Invalid value: "{name}": {_SUBDOMAIN_TEXT}'
        raise _invalid(kind, name, detail)
    _check_size(kind, metadata)
    if target.resource == "events":
        _check_event(target.namespace, name, given)


def check_changed(target: Target, stored: Json, fresh: Json) -> None:
    """Check the result of a patch or a replacement.

    Raises:
        BadRequestError, ConflictError, InvalidError, UnclassifiedError: as the real server does.
    """
    kind, held, given = KINDS[target.resource], stored["metadata"], fresh.get("metadata") or {}
    wrong = _wrong_marks(given)
    if fresh.get("kind", kind) != kind:
        wrong = f"no kind {fresh['kind']} for {kind}"
    if wrong:
        raise InvalidError(f' "" is invalid: patch: Invalid value: {json.dumps(fresh)}: {wrong}')
    if given.get("name") != target.name:
        raise BadRequestError(_misnamed(target.name, given.get("name")))
    if given.get("namespace", target.namespace) != target.namespace:
        raise BadRequestError(_OTHER_NAMESPACE)
    _check_version(target, held["resourceVersion"], given.get("resourceVersion"))
    if given.get("uid", held["uid"]) != held["uid"]:
        detail = f'metadata.uid: Invalid value: "{given["uid"]}": field is immutable'
        raise _invalid(kind, target.name, detail)
    _check_size(kind, given)
    if target.full_resource == "pods" and fresh.get("spec") != stored.get("spec"):
        raise _invalid(kind, target.name, _POD_SPEC)


def _check_version(target: Target, held: str, version: str | None) -> None:
    if not version or version == held:
        return
    if not version.isdecimal():
        raise UnclassifiedError(f'strconv.ParseUint: parsing "{version[:64]}": invalid syntax')
    refused = f'Operation cannot be fulfilled on {target.resource} "{target.name}": '
    raise ConflictError(refused + _MODIFIED)


def _check_event(namespace: str, name: str, given: Json) -> None:
    """Check that an Event is in its object's namespace, or in `default` if that has none."""
    about = (given.get("involvedObject") or {}).get("namespace", "")
    if about != namespace and not (about == "" and namespace == "default"):
        detail = f'involvedObject.namespace: Invalid value: "{about}": does not match '
        raise _invalid("Event", name, detail + "event.namespace")


def _check_size(kind: str, metadata: Json) -> None:
    marks = metadata.get("annotations") or {}
    size = sum(len(key.encode()) + len(value.encode()) for key, value in marks.items())
    if size > _TOO_LONG:
        detail = f"metadata.annotations: Too long: may not be more than {_TOO_LONG} bytes"
        raise _invalid(kind, metadata.get("name", ""), detail)


def _wrong_marks(metadata: Json) -> str:
    """The error of Go's decoder for labels and annotations that are no strings."""
    for kind in ("annotations", "labels"):
        for value in (metadata.get(kind) or {}).values():
            if not isinstance(value, str):
                word = _GO_WORDS.get(type(value), "number")
                where = f"Go struct field ObjectMeta.metadata.{kind} of type string"
                return f"json: cannot unmarshal {word} into {where}"
    return ""


def _misnamed(expected: str, name: str | None) -> str:
    if not name:
        missing = f"({expected} based on URL) was undeterminable: name must be provided"
        return f"the name of the object {missing}"
    return f"the name of the object ({name}) does not match the name on the URL ({expected})"


def _unreadable(given: str, kind: str, detail: str) -> str:
    return f'{given} in version "v1" cannot be handled as a {kind}: {detail}'


def _invalid(kind: str, name: str, detail: str) -> InvalidError:
    return InvalidError(f'{kind} "{name}" is invalid: {detail}')
