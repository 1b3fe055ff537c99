"""Nothing grows past what one person reads in one sitting. Functions are ruff's part."""

import ast
from pathlib import Path

import pytest

from tests.shape import tree

LINES = 400
WITH_CODE = {Path("agent/__init__.py"): "holds the version"}


def test_a_module_has_at_most_400_lines():
    sizes = {p: tree.text(p).count("\n") for p in tree.modules("agent") + tree.modules("tests")}

    assert {} == {path: lines for path, lines in sizes.items() if lines > LINES}


@pytest.mark.parametrize(
    "package", [p for p in tree.packages() if p / "__init__.py" not in WITH_CODE], ids=str
)
def test_a_package_file_holds_only_its_docstring(package: Path):
    body = tree.parsed(package / "__init__.py").body

    assert [ast.Expr] == [type(statement) for statement in body]


def test_the_version_is_all_that_the_top_package_holds():
    body = tree.parsed(Path("agent/__init__.py")).body

    assert ["Expr", "Assign"] == [type(statement).__name__ for statement in body]


def test_a_module_says_its_duty_first():
    assert [] == [p for p in tree.modules("agent") if not ast.get_docstring(tree.parsed(p))]


def test_every_folder_of_the_agent_is_a_package():
    assert set(tree.packages()) == {path.parent for path in tree.modules("agent")}
