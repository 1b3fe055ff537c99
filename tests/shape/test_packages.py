"""Each room says what it is for and what it may never do."""

import ast
import re
from pathlib import Path

import pytest

from tests.shape import tree


@pytest.mark.parametrize("package", [p for p in tree.packages() if p != Path("agent")], ids=str)
def test_a_package_says_what_it_may_never_do(package: Path):
    docstring = ast.get_docstring(tree.parsed(package / "__init__.py")) or ""

    assert re.search(r"\bn?ever\b", docstring)


def test_every_folder_of_the_agent_is_a_package():
    folders = {path.parent for path in tree.modules("agent")}

    assert folders == set(tree.packages())


def test_the_tests_are_no_package():
    assert [] == [path for path in tree.modules("tests") if path.name == "__init__.py"]
