"""What the documents say is there, is there; what is there, the documents name."""

import re
from collections.abc import Iterator

import pytest

from agent import errors
from agent.app.main import OS_ERROR
from agent.cli.doctor import CHECKS
from agent.cli.main import VERBS, parser_of
from agent.kube.objects import AWAY
from agent.sandbox.explain.placement import ADVICE
from agent.web.runbook import entries
from tests.shape import tree
from tests.shape.typed import runs_of

EXIT_CODES = {0, *(getattr(one, "exit_code", OS_ERROR) for one in vars(errors).values())}
COMMAND = re.compile(r"(?:^\s*|`)(make|hami-agent) ([a-z][a-z-]*)", re.MULTILINE)
DOCUMENTS = [str(path) for path in tree.files() if path.suffix == ".md"]
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)


def test_the_architecture_names_every_package():
    for package in tree.packages():
        assert f"`{package}/`" in tree.text("ARCHITECTURE.md")


def test_the_runbook_explains_every_refusal():
    for gate in errors.RefusalReason:
        assert 1 == tree.text("RUNBOOK.md").count(f"### {gate.value} "), gate


def test_the_runbook_explains_no_refusal_that_is_not_there():
    explained = set(re.findall(r"HA-\d{4}", tree.text("RUNBOOK.md")))

    assert set() == explained - {gate.value for gate in errors.RefusalReason}


REASON = re.compile(
    r'"((?:Card|Node|Numa|Exclusive|Allocated|ResourceQuota)[A-Z]?[a-z]+(?:[A-Z][a-z]+)+)"'
)


def test_the_runbook_explains_every_reason_for_which_a_pod_stays_pending():
    models = [path for path in tree.modules("agent") if "scheduler" in path.parts]
    reasons = {word for path in models for word in REASON.findall(tree.text(path))}

    assert {"CardNotHealth", "NodeInsufficientDevice", "NumaNotFit"} <= reasons
    assert [] == sorted(word for word in reasons if f"\n### {word} " not in tree.text("RUNBOOK.md"))


def explained() -> set[str]:
    """The ids that `explain` gives to its gates."""
    modules = [path for path in tree.modules("agent") if "explain" in path.parts]
    found = {word for path in modules for word in re.findall(r'"(E-[A-Z]+)"', tree.text(path))}
    return found | set(ADVICE)


def test_the_runbook_explains_every_id_that_explain_prints():
    assert {"E-LOCK", "E-NODE", "NodeUnregistered", "CardNotHealth"} <= explained()
    runbook = tree.text("RUNBOOK.md")
    assert [] == sorted(word for word in explained() if 1 != runbook.count(f"\n### {word} "))


def test_the_runbook_explains_no_id_that_explain_never_prints():
    named = set(re.findall(r"^### (E-[A-Z]+) ", tree.text("RUNBOOK.md"), re.MULTILINE))

    assert set() == named - explained()


def test_the_runbook_explains_all_that_the_doctor_looks_at():
    for point in CHECKS:
        assert 1 == tree.text("RUNBOOK.md").count(f"### {point} "), point


def test_the_runbook_explains_every_fault_of_a_gpu():
    modules = [path for path in tree.modules("agent") if "sandbox" not in path.parts]
    named = {word for path in modules for word in re.findall(r'"(H-[A-Z]+)"', tree.text(path))}

    assert {"H-LOST", "H-PROBE", "H-SILENT", "H-RELEASED"} <= named
    assert [] == sorted(named - entries().keys())


def test_the_verb_runbook_has_every_id_that_the_product_prints():
    printed = {*(gate.value for gate in errors.RefusalReason), *explained(), *CHECKS, "H-NNN", AWAY}

    assert [] == sorted(printed - entries().keys())


def test_the_runbook_explains_every_exit_code():
    for code in EXIT_CODES:
        assert 1 == tree.text("RUNBOOK.md").count(f"\n| {code} | "), code


def test_an_id_that_a_document_names_is_in_the_runbook():
    for document in DOCUMENTS:
        # The changelog also names those that are gone.
        text = re.sub(r"(?s)\*\*Ids that are gone:\*\*.*?\n- ", "", tree.text(document))
        named = set(re.findall(r"\b(?:HA-\d{4}|[PHE]-[A-Z]{3,})\b", text))
        explained = re.findall(r"^### ([A-Z]+-[A-Z0-9]+) ", tree.text("RUNBOOK.md"), re.MULTILINE)

        assert set() == named - set(explained)


LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def test_a_link_leads_to_a_file_and_a_heading():
    for document in DOCUMENTS:
        for target, anchor in LINK.findall(tree.text(document)):
            found = (tree.ROOT / document).parent / target if target else tree.ROOT / document
            assert found.exists(), target
            if anchor:
                page = found / "README.md" if found.is_dir() else found
                assert anchor in anchors(page.read_text(encoding="utf-8")), f"{target}#{anchor}"


def anchors(text: str) -> set[str]:
    """What its headings are called in addresses."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


def commands(document: str) -> Iterator[tuple[str, str]]:
    """What a document tells people to type: every `make X` and `hami-agent X` in code."""
    for code in re.findall(
        r"^```\w*\n(.*?)^```|(`[^`\n]+`)", tree.text(document), re.MULTILINE | re.DOTALL
    ):
        yield from COMMAND.findall("".join(code))


def test_a_make_target_that_is_told_of_or_a_step_exists():
    targets = set(TARGET.findall(tree.text("Makefile")))
    steps = " ".join(re.findall(r"^step (.+)$", tree.text(".ci/run"), re.MULTILINE)).split()

    assert steps
    assert set() == set(steps) - targets
    for document in DOCUMENTS:
        assert set() == {word for tool, word in commands(document) if tool == "make"} - targets


def test_a_verb_that_is_told_of_exists():
    for document in [*DOCUMENTS, "deploy/manifests/config.yaml"]:
        assert set() == {word for tool, word in commands(document) if tool == "hami-agent"} - set(
            VERBS
        )


CALLS = [
    words for words in runs_of("hami-agent") if words[0] in VERBS and {*words[1:]} - {"--help"}
]
"""Those with arguments: a verb alone is a word about it."""


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_a_call_that_is_told_of_is_taken_with_its_options(words: tuple[str, ...]):
    assert parser_of(words[0]).parse_args(words)
