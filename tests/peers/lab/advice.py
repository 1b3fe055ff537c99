"""What `explain` advises, done: the pod after the change that it names."""

import copy
import re
from typing import Final

from tests.peers.lab.api import Object

_DROP: Final = re.compile(r"drop the annotation (\S+)")
_LESS: Final = re.compile(r"ask for at most ([\d,]+) .*?\((nvidia\.com/\w+)\)")


def as_advised(pod: Object, said: str) -> Object:
    """The pod after that change, under another name. Raises AssertionError: it names none."""
    changed = copy.deepcopy(pod)
    metadata, spec = changed["metadata"], changed["spec"]
    metadata["name"] += "-again"
    if dropped := _DROP.fullmatch(said):
        del metadata["annotations"][dropped[1]]
    elif less := _LESS.match(said):
        spec["containers"][0]["resources"]["limits"][less[2]] = less[1].replace(",", "")
    elif said.startswith("drop nodeSelector,"):
        del spec["nodeSelector"]
    elif said.startswith("create the pod again without schedulerName"):
        del spec["schedulerName"]
        metadata.pop("labels", None)
    else:
        raise AssertionError(f"nothing to make of {said!r}")
    return changed
