"""Prints the findings of `doctor`: lines for people, or a document for programs."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import yaml

from agent.codec.status_document import API_VERSION
from agent.core.errors import cap
from agent.core.node.check_groups import consequence, group_of
from agent.core.node.findings import Finding, PreflightVerdict, counted

_LONGEST: Final = 1024
"""Characters of a text; some come from the cluster."""


def write_lines(findings: Sequence[Finding], *, before: bool) -> None:
    """Print a line for each finding and one with their numbers. `before`: of `doctor --pre`."""
    if before:
        sys.stdout.writelines(map(_line, findings))
    else:
        sys.stdout.writelines(line for one in findings for line in _lines(one))
    sys.stdout.write(_sum(findings))


def write_document(findings: Sequence[Finding], form: str, *, before: bool) -> None:
    """Print the findings as JSON or YAML (`form`)."""
    counts = Counter(one.verdict for one in findings)
    document: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": "Preflight" if before else "Checkup",
        "ok": not counts[PreflightVerdict.WRONG],
    }
    if not before:
        document["complete"] = not counts[PreflightVerdict.UNKNOWN]
    document["findings"] = [_entry(one, before=before) for one in findings]
    if form == "yaml":
        yaml.safe_dump(document, sys.stdout, sort_keys=False, allow_unicode=True, width=100)
    else:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _line(finding: Finding) -> str:
    verdict, point = finding.verdict, finding.point.value
    line = f"{verdict.value:<6} {point:<11} {_safe(f'{finding.subject}: {finding.said}')}"
    if finding.advice:
        line += f"; {_safe(finding.advice)}"
    return line + ("\n" if verdict is PreflightVerdict.OK else f" [RUNBOOK {point}]\n")


def _lines(finding: Finding) -> Iterator[str]:
    group, verdict, point = group_of(finding.point).value, finding.verdict, finding.point.value
    said = _safe(f"{finding.subject}: {finding.said}")
    yield f"{group:<10} {verdict.value:<8} {point:<12} {said}\n"
    if verdict in {PreflightVerdict.WRONG, PreflightVerdict.NOTE}:
        yield f"{'':<20}means: {consequence(finding)}\n"
    if verdict is not PreflightVerdict.OK:
        advice = _safe(finding.advice)
        yield f"{'':<20}to do: {advice}{' ' if advice else ''}[RUNBOOK {point}]\n"


def _safe(text: str) -> str:
    """The text in one line, without what a terminal would obey."""
    return cap(text, _LONGEST)


def _sum(findings: Sequence[Finding]) -> str:
    counts = Counter(one.verdict for one in findings)
    notes = counted(counts[PreflightVerdict.NOTE], "note")
    unknown = counts[PreflightVerdict.UNKNOWN]
    unseen = f", {unknown} not checked" if unknown else ""
    wrong = counts[PreflightVerdict.WRONG]
    return f"{wrong} wrong, {notes}, {counts[PreflightVerdict.OK]} ok{unseen}\n"


def _entry(finding: Finding, *, before: bool) -> dict[str, str]:
    entry = {
        "id": finding.point.value,
        "verdict": finding.verdict.value.lower(),
        "subject": finding.subject,
        "said": finding.said,
        "advice": finding.advice,
    }
    if before:
        return entry
    means = "" if finding.verdict is PreflightVerdict.OK else consequence(finding)
    return entry | {"group": group_of(finding.point).value, "means": means}
