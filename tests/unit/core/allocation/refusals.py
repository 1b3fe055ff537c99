"""What every refusal owes to the pod's owner, and what the runbook promises of each."""

import re
from pathlib import Path

from agent.errors import Refusal, RefusalReason

RUNBOOK = Path(__file__).resolve().parents[4] / "RUNBOOK.md"
PASSING = frozenset(
    RefusalReason(found)
    for found in re.findall(
        r"^### (HA-\d{4}) .*\n\n\*Passing\.\*", RUNBOOK.read_text(), re.MULTILINE
    )
)
"""Gates that are about a moment: the runbook says that they are UNAVAILABLE."""


def check_refusal(
    refusal: Refusal, gate: RefusalReason, *, wrong: str, todo: str, pod: str = ""
) -> None:
    """One sentence that says what is wrong and what to do, of which pod, with the short id."""
    assert gate is refusal.gate
    assert str(refusal) == f"{refusal.sentence} [{gate.value}]"
    sentence = refusal.sentence
    assert sentence[0].isupper()
    assert sentence.endswith((".", "?"))
    assert sentence.isprintable()
    assert len(sentence) < 700
    for words in (wrong, todo, pod):
        assert words in sentence
    assert (gate in PASSING) == refusal.transient
