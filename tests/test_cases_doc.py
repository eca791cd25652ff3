"""docs/cases.md names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = re.findall(r"^\| (\d+) \| .+? \| (.+?) \|$", (TESTS.parent / "docs" / "cases.md").read_text(), re.MULTILINE)


def test_every_row_stands_once_and_in_order():
    numbers = [int(number) for number, _ in ROWS]
    assert len(numbers) >= 32 and numbers == sorted(set(numbers))


@pytest.mark.parametrize(("row", "cell"), ROWS, ids=[f"row {number}" for number, _ in ROWS])
def test_the_tests_of_a_row_exist(row, cell):
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", cell)
    assert named and len(named) == cell.count("`") // 2
    for file, name in named:
        tree = ast.parse((TESTS / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"
