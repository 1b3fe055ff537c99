#!/usr/bin/env python3
"""Prints what operators ask first, as tables of Markdown: exposure, sizes, gaps, rights.

    deploy/facts.py

What was not measured on this machine yet is named with the command that measures it. Ends with 1
only where something is wrong: a fact is beyond its bound, or a file with one cannot be read. Times
beyond their bound are called `over` and no more: machines are shared, and the test that measured
them fails far beyond.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
BUILT: Final = ROOT / "build"
UNIT: Final = "systemd/hami-agent.service"
MEGABYTE: Final = 1_000_000
OWN: Final = "deploy/manifests/rbac.yaml"
POLICIES: Final = "deploy/manifests/admission.yaml"

EXPOSURE: Final = 2.0
SIZES: Final = {"small": {"packed": 35, "unpacked": 90}, "slim": {"packed": 120}}
"""Megabytes that an image may have: as it travels, and on a node's disk. Unpacked, the slim base
alone has nearly what its image may have packed, so nothing is promised of that."""
TIMES: Final = (
    ("systemd.json", "SIGKILL → the kubelet has", "median", "make test-systemd"),
    ("peers.json", "rolling update", "", "make test-peers"),
)
"""File in build/, two parts of a row's name, and the command that writes it."""
HEAD: Final = ("resource", "verbs of the account", "what policies leave of it", "a node's own user")
LEFT: Final = {
    "nodes": ("changes: its own Node, annotations {}", "its own Node"),
    "pods": ("reads of all", "those of its node"),
    "pods/status": ("pods of its node, annotations {}", "those of its node"),
    "events": ("its own, about its Node or a pod", "any"),
}
"""What the account of all nodes, and what the user of one node, may do with a resource."""
POLICY: Final = {"nodes": "hami-agent-node", "pods/status": "hami-agent-pods"}
"""Who knows which annotations."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line. `found` empty: `command` measures it. `wrong`: it must not be so."""

    what: str
    found: str = ""
    bound: str = ""
    command: str = ""
    wrong: bool = False


def main(built: Path = BUILT) -> int:
    """Print all, with what was measured in `built`; the exit status."""
    try:
        facts = (exposure(), *images(built / "image"), *times(built))
        rights = tuple(granted())
    except (ValueError, KeyError, TypeError, OSError) as error:
        sys.stderr.write(
            f"facts: {type(error).__name__}: {error}; remove build/ and measure anew\n"
        )
        return 1
    sys.stdout.write(text(facts, rights))
    return int(any(fact.wrong for fact in facts))


def text(facts: Sequence[Fact], rights: Sequence[Sequence[str]]) -> str:
    """Both tables, and what is missing."""
    rows = [(one.what, one.found or "not measured", one.bound) for one in facts]
    lines = list(table(("what", "found", "at most"), rows))
    lines += ["", *table(HEAD, rights)]
    missing = [
        f"Not measured here: {one.what}. Run `{one.command}`." for one in facts if not one.found
    ]
    return "\n".join((*lines, *([""] if missing else []), *missing)) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"


def exposure() -> Fact:
    """What systemd thinks of the unit: from 0, shut off, to 10; versions differ a little."""
    what = "exposure of the systemd unit"
    program = shutil.which("systemd-analyze")
    if program is None:
        return Fact(what, command="apt-get install systemd && make facts")
    said = ran(program, "security", "--offline=true", "--no-pager", str(ROOT / UNIT))
    number = float(matched(r"Overall exposure level for [^:]*: ([0-9.]+)", said))
    version = matched(r"systemd (\d+)", ran(program, "--version"))
    return Fact(
        f"{what}, by systemd {version}", f"{number:.1f}", f"{EXPOSURE:.1f}", wrong=number > EXPOSURE
    )


def ran(*command: str) -> str:
    """What a program of this machine says."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 -- fixed arguments


def matched(pattern: str, said: str) -> str:
    """The part in brackets. Raises ValueError."""
    found = re.search(pattern, said)
    if found is None:
        raise ValueError(f"no {pattern!r} in {said[:200]!r}")
    return found[1]


def images(folder: Path) -> Iterator[Fact]:
    """What each of the images in `folder` weighs."""
    for base, bounds in SIZES.items():
        what = f"image on the {base} base, packed / unpacked"
        path = folder / base / "facts.json"
        if path.is_file():
            yield weighed(what, json.loads(path.read_text()), bounds)
        else:
            yield Fact(what, command="make image")


def weighed(what: str, measured: Mapping[str, Any], bounds: Mapping[str, int]) -> Fact:
    """One image, from bytes."""
    megabytes = {kind: measured[kind] / MEGABYTE for kind in ("packed", "unpacked")}
    found = " / ".join(f"{one:.0f} MB" for one in megabytes.values())
    most = " / ".join(f"{bounds[kind]} MB" if kind in bounds else "any" for kind in megabytes)
    wrong = any(megabytes[kind] > bound for kind, bound in bounds.items())
    return Fact(what, found, most, wrong=wrong)


def times(folder: Path) -> Iterator[Fact]:
    """What was measured beside a real systemd and in a real cluster."""
    for name, first, second, command in TIMES:
        path = folder / name
        rows = json.loads(path.read_text()) if path.is_file() else []
        found = [row for row in rows if first in row["what"] and second in row["what"]]
        yield from (timed(row) for row in found)
        if not found:
            yield Fact(f"{first} …", command=command)


def timed(row: Mapping[str, Any]) -> Fact:
    """One row of such a table."""
    bound, unit = row["bound"], row["unit"]
    over = bound is not None and row["measured"] > bound
    found = f"{row['measured']:.2f} {unit}{' (over)' if over else ''}"
    return Fact(row["what"], found, "" if bound is None else f"{bound:g} {unit}")


def granted() -> Iterator[Sequence[str]]:
    """The chart's rights, verb by verb, and what remains of them from Kubernetes 1.30 on."""
    (role,) = (one for one in documents(OWN) if one["kind"] == "ClusterRole")
    policies = {
        one["metadata"]["name"]: one["spec"]
        for one in documents(POLICIES)
        if one["kind"] == "ValidatingAdmissionPolicy"
    }
    for rule in role["rules"]:
        for resource in rule["resources"]:
            left, own_user = LEFT[resource]
            keys = annotations(policies[POLICY[resource]]) if resource in POLICY else ""
            yield (f"`{resource}`", ", ".join(rule["verbs"]), left.format(keys), own_user)


def documents(path: str) -> Iterator[Mapping[str, Any]]:
    """The objects of one of the manifests."""
    yield from yaml.safe_load_all((ROOT / path).read_text(encoding="utf-8"))


def annotations(policy: Mapping[str, Any]) -> str:
    """The keys that a policy lets the agent change."""
    (own,) = (one["expression"] for one in policy["variables"] if one["name"] == "own")
    rules = " ".join(one["expression"] for one in policy["validations"])
    below = dict.fromkeys(re.findall(r'startsWith\("([^"]+)"\)', rules))
    removed = re.findall(r'key == "([^"]+)"', rules)
    keys = [f"`{key}`" for key in json.loads(own)]
    keys += [f"below `{prefix}`" for prefix in below]
    return ", ".join((*keys, *(f"`{key}` (removal)" for key in removed)))


if __name__ == "__main__":
    sys.exit(main())  # noqa: TID251 -- a program's exit status
