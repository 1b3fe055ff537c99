"""The verbs of `hami-agent` as an operator runs them: each a process, with the admin's rights."""

import asyncio
import copy
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.peers.lab.agents import SOURCE
from tests.peers.lab.api import Object
from tests.peers.lab.control import ADMIN
from tests.peers.lab.pods import NAMESPACE
from tests.peers.lab.requests import WithRequests

SECONDS: Final = 60.0
"""Until a verb is taken to hang; on a quiet machine it takes one."""
_REASONS: Final = re.compile(r"0/1 nodes are available: 1 (.+?)\.(?: |$)")


@dataclass(frozen=True, slots=True)
class VerbAnswer:
    """How a verb ended, what it printed, and what it complained about."""

    code: int
    text: str
    errors: str

    @property
    def document(self) -> Any:
        """What it printed, as JSON. Raises AssertionError: it is none."""
        try:
            return json.loads(self.text)
        except json.JSONDecodeError:
            raise AssertionError(f"exit {self.code}: {self.text}{self.errors}") from None


@dataclass(frozen=True, slots=True)
class Explained:
    """What `explain` says of one pod."""

    code: int
    data: Mapping[str, Any]

    @property
    def blocked(self) -> tuple[str, str] | None:
        """The gate that says no, with its reason; None if none does."""
        shut = [one for one in self.data["gates"] if one["verdict"] == "blocked"]
        return (shut[0]["name"], shut[0]["reason"]) if shut else None

    @property
    def changes(self) -> list[str]:
        """What would place the pod, the smallest change first."""
        return [one["said"] for one in self.data["changes"]]

    @property
    def reasons(self) -> set[str]:
        """What keeps the pod off the Node that is told first, in HAMi's own words."""
        return set(self.data["nodes"][0]["reason"].split(", "))

    def gate(self, name: str) -> Mapping[str, Any]:
        """One gate. Raises StopIteration: there is none of that name."""
        found: Mapping[str, Any] = next(one for one in self.data["gates"] if one["name"] == name)
        return found

    def gpus(self) -> dict[int, str]:
        """By index, the reason of each GPU of the Node that is told first."""
        return {gpu["index"]: gpu["reason"] for gpu in self.data["nodes"][0]["gpus"]}


# What `explain` advises, done: the pod after the change that it names.

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
    else:
        raise AssertionError(f"nothing to make of {said!r}")
    return changed


class WithVerbs(WithRequests):
    """The verbs of `hami-agent`, run by an operator."""

    async def verb(self, *words: str, on_node: bool = False) -> VerbAnswer:
        """Run a verb from anywhere, or on the node itself, with the node's files."""
        room = self.root / "home"
        room.mkdir(exist_ok=True)
        command = (sys.executable, "-m", "agent", *words)
        process = await asyncio.create_subprocess_exec(
            *(self.space.command(command) if on_node else command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                "PYTHONPATH": str(SOURCE),
                "PATH": "/usr/bin:/bin",
                "HOME": str(room),
                "KUBECONFIG": str(self.plane.kubeconfig(ADMIN)),
            },
        )
        try:
            async with asyncio.timeout(SECONDS):
                text, errors = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        told = (part.decode(errors="replace") for part in (text, errors))
        return VerbAnswer(process.returncode or 0, *told)

    async def explain(self, name: str) -> Explained:
        """What `explain` says of a pod of the tests. Raises AssertionError: it cannot."""
        answer = await self.verb("explain", f"{NAMESPACE}/{name}", "-o", "json")
        return Explained(answer.code, answer.document["data"])

    def told_reasons(self, name: str) -> set[str]:
        """What HAMi's scheduler said last of the one Node, by the pod's condition.

        Each is a reason of the Node, or one of its GPUs with how many of them it keeps out. An
        Event of kube-scheduler may still have the text of an attempt before the last one.
        """
        conditions = self.status_of(name).get("conditions") or ()
        texts = (one.get("message") or "" for one in conditions if one["type"] == "PodScheduled")
        found = _REASONS.match(next(texts, ""))
        return set(found[1].split(", ")) if found else set()

    async def until_reasons(self, name: str, *reasons: str, within: float = 40.0) -> None:
        """Return once these are the reasons that were told last of a pod. Raises TimeoutError."""
        try:
            await self.pods.until(
                lambda: set(reasons) == self.told_reasons(name), within, f"{name} is not {reasons}"
            )
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self.status_of(name)}") from None
