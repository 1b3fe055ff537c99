"""Nothing grows past what one person reads in one sitting. Functions are ruff's part."""

import ast
from pathlib import Path

from tests.shape import tree

LINES = 400
WITH_CODE = {Path("agent/__init__.py"): "holds the version"}


def test_a_module_has_at_most_400_lines():
    sizes = {p: tree.text(p).count("\n") for p in tree.modules("agent") + tree.modules("tests")}

    assert {} == {path: lines for path, lines in sizes.items() if lines > LINES}


def test_a_package_file_holds_only_its_docstring():
    files = [path / "__init__.py" for path in tree.packages()]
    bodies = {path: tree.parsed(path).body for path in files if path not in WITH_CODE}

    assert [] == [path for path, body in bodies.items() if [ast.Expr] != list(map(type, body))]


def test_the_version_is_all_that_the_top_package_holds():
    body = tree.parsed(Path("agent/__init__.py")).body

    assert ["Expr", "Assign"] == [type(statement).__name__ for statement in body]


def test_a_module_says_its_duty_first():
    assert [] == [p for p in tree.modules("agent") if not ast.get_docstring(tree.parsed(p))]


def test_every_folder_of_the_agent_is_a_package():
    assert set(tree.packages()) == {path.parent for path in tree.modules("agent")}
