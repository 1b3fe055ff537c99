"""Renders the answer of a verb for programs: one form of document for all verbs."""

import datetime as dt
import json

import msgspec

from agent.codec.nodelock import encode_stamp
from agent.codec.status_document import API_VERSION


def document(kind: str, data: object, form: str, at: dt.datetime, source: str = "") -> str:
    """The answer as a document. `form`: json or yaml. `at`: when the data was made or read.

    `source`: where it was read from; empty: on this machine, by the verb itself.
    """
    whole: dict[str, object] = {
        "apiVersion": API_VERSION,
        "kind": kind,
        "generatedAt": encode_stamp(at),
    }
    whole |= {"source": source} if source else {}
    text = json.dumps(msgspec.to_builtins(whole | {"data": data}), indent=2)
    if form == "yaml":
        import yaml  # noqa: PLC0415 -- only this form needs it

        return yaml.safe_dump(json.loads(text), sort_keys=False)  # without aliases
    return f"{text}\n"
