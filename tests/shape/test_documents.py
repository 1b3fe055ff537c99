"""What the documents say is there, is there; what is there, the documents name."""

import re
from collections import Counter
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

COMMAND = re.compile(r"(?:^\s*|`)(make|hami-agent) ([a-z][a-z-]*)", re.MULTILINE)
DOCUMENTS = [str(path) for path in tree.files() if path.suffix == ".md"]
RUNBOOK = tree.text("RUNBOOK.md")
HEADINGS = Counter(re.findall(r"(?m)^### (\S+) ", RUNBOOK))
REASON = r'"((?:Card|Node|Numa|Exclusive|Allocated|ResourceQuota)[A-Z]?[a-z]+(?:[A-Z][a-z]+)+)"'


def words(pattern: str, *, within: str = "", without: str = " ") -> set[str]:
    """What a pattern finds in the agent's files below a folder of that name."""
    paths = [path for path in tree.modules("agent") if without not in path.parts]
    texts = (tree.text(path) for path in paths if not within or within in path.parts)
    return {word for text in texts for word in re.findall(pattern, text)}


REFUSALS = {gate.value for gate in errors.RefusalReason}
EXPLAINED = words(r'"(E-[A-Z]+)"', within="explain") | set(ADVICE)
PRINTED = {
    "E-LOCK NodeUnregistered CardNotHealth": EXPLAINED,
    "CardNotHealth NodeInsufficientDevice NumaNotFit": words(REASON, within="scheduler"),
    "H-LOST H-PROBE H-SILENT H-RELEASED": words(r'"(H-[A-Z]+)"', without="sandbox"),
    "HA-2004": REFUSALS,
    "P-PATHS": set(CHECKS),
}
"""The ids that the product prints, by some of them."""


@pytest.mark.parametrize("some", PRINTED)
def test_the_runbook_explains_every_id_that_is_printed(some):
    assert set(some.split()) <= PRINTED[some]
    assert {} == {one: HEADINGS[one] for one in PRINTED[some] if HEADINGS[one] != 1}
    assert [] == sorted((PRINTED[some] | {"H-NNN", AWAY}) - entries().keys())


def test_the_runbook_explains_nothing_that_is_never_printed():
    explained = set(re.findall(r"(?m)HA-\d{4}|(?<=^### )E-[A-Z]+(?= )", RUNBOOK))

    assert set() == explained - REFUSALS - EXPLAINED


def test_the_runbook_explains_every_exit_code():
    for code in {0, *(getattr(one, "exit_code", OS_ERROR) for one in vars(errors).values())}:
        assert 1 == RUNBOOK.count(f"\n| {code} | "), code


def test_an_id_that_a_document_names_is_in_the_runbook():
    for document in DOCUMENTS:
        # The changelog also names those that are gone.
        text = re.sub(r"(?s)\*\*Ids that are gone:\*\*.*?\n- ", "", tree.text(document))
        named = set(re.findall(r"\b(?:HA-\d{4}|[PHE]-[A-Z]{3,})\b", text))

        assert set() == named - HEADINGS.keys()


def test_the_architecture_names_every_package():
    for package in tree.packages():
        assert f"`{package}/`" in tree.text("ARCHITECTURE.md")


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
    headings = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


def commands(document: str) -> Iterator[tuple[str, str]]:
    """What a document tells people to type: every `make X` and `hami-agent X` in code."""
    for code in re.findall(r"(?ms)^```\w*\n(.*?)^```|(`[^`\n]+`)", tree.text(document)):
        yield from COMMAND.findall("".join(code))


def test_a_make_target_or_a_verb_that_is_told_of_or_a_step_exists():
    targets = set(re.findall(r"(?m)^([a-z][a-z-]*):", tree.text("Makefile")))
    steps = " ".join(re.findall(r"(?m)^step (.+)$", tree.text(".ci/run"))).split()
    told = {one for name in [*DOCUMENTS, "deploy/manifests/config.yaml"] for one in commands(name)}

    assert steps
    assert set() == set(steps) - targets
    assert set() == {word for tool, word in told if tool == "make"} - targets
    assert set() == {word for tool, word in told if tool == "hami-agent"} - set(VERBS)


CALLS = [
    words for words in runs_of("hami-agent") if words[0] in VERBS and {*words[1:]} - {"--help"}
]
"""Those with arguments: a verb alone is a word about it."""


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_a_call_that_is_told_of_is_taken_with_its_options(words):
    assert parser_of(words[0]).parse_args(words)
