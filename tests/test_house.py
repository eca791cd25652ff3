"""The house: few rooms, each with its sentence, and functions that a reader can call without counting on fingers."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "dflash"
MOST_PARAMETERS, MOST_MODULES, MOST_ROOMS = 8, 4, 14


def functions(tree: ast.AST, inside: tuple[str, ...] = ()):
    """(qualified name, node, the class it is in) of every function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ".".join([*inside, node.name]), node, tree
            yield from functions(node, (*inside, node.name))
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, (*inside, node.name))
        else:
            yield from functions(node, inside)


def parameters(node: ast.FunctionDef) -> int:
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len(named) - (bool(named) and named[0].arg in ("self", "cls"))


def in_a_kernel(node: ast.FunctionDef, owner: ast.AST) -> bool:
    """A function of Triton, or the forward of an autograd function: they have no other way to get a value."""
    jitted = any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)
    return jitted or isinstance(owner, ast.ClassDef) and any("Function" in ast.unparse(base) for base in owner.bases)


def too_many(source: str) -> list[str]:
    found = functions(ast.parse(source))
    return [name for name, node, owner in found if parameters(node) > MOST_PARAMETERS and not in_a_kernel(node, owner)]


def test_no_function_has_more_than_eight_parameters():
    wrong = {
        (path.relative_to(PACKAGE).as_posix(), name) for path in PACKAGE.rglob("*.py") for name in too_many(path.read_text())
    }
    assert wrong == set()


def test_the_count_counts():
    names = ", ".join("abcdefgh")
    assert too_many(f"def f({names}): ...") == [] and too_many(f"def f({names}, *, i): ...") == ["f"]
    assert too_many(f"class C:\n    def m(self, {names}): ...") == []
    assert too_many(f"class C:\n    def m(self, {names}, i): ...") == ["C.m"]
    assert too_many(f"if 1:\n    def f({names}):\n        def g({names}, i): ...") == ["f.g"]
    assert too_many(f"@triton.jit\ndef f({names}, i): ...") == []
    assert too_many(f"class C(torch.autograd.Function):\n    def forward(ctx, {names}, i): ...") == []


def test_few_modules_and_few_rooms_each_with_its_sentence():
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_MODULES
    rooms = [path.parent for path in PACKAGE.glob("*/__init__.py")]
    assert 1 < len(rooms) <= MOST_ROOMS
    for room in rooms:
        sentence = (ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or "").splitlines()
        assert sentence and len(sentence[0]) > 20, f"{room.name}/__init__.py says nothing"


def test_no_class_looks_into_another_ones_private_names():
    """Of the way of a run: an attribute with an underscore belongs to the object itself."""
    rooms = ("train", "distributed", "launch")
    wrong = []
    for room in rooms:
        for path in (PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                    continue
                if ast.unparse(node.value) not in ("self", "cls", "super()"):
                    wrong.append(f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}")
    # a rank's own end; operations over many tensors; torch keeps hooks nowhere else
    allowed = ("os._exit", "torch._foreach_", "module._forward_hooks")
    assert [one for one in wrong if not any(name in one for name in allowed)] == []
