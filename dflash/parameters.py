"""A notebook's parameters cell, read without running it: names, declared types, defaults, help.

papermill warns about an unknown parameter and goes on with the default, and delivers `5_6` as 56 and `false` as a
true string. Here a wrong name or type is an error before anything runs.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from .errors import ConfigError, RunError
from .run_config import coerce, setting_names

TYPES = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "tuple": tuple}
TAG = "parameters"


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell: `name: annotation = default  # help`."""

    name: str
    annotation: str
    default: Any
    help: str

    def coerce(self, value: Any) -> Any:
        """`value` as the declared type; ConfigError naming the parameter otherwise."""
        if not self.annotation:
            return value
        try:
            declared = eval(self.annotation, {"__builtins__": {}}, TYPES)  # the notebook's own line
        except Exception:
            return value
        if declared in (list, dict, tuple):
            if isinstance(value, declared):
                return value
            hint = f"pass it with -y '{self.name}: ...'"
            raise ConfigError(f"{self.name} must be a {self.annotation}, got {value!r}; {hint}")
        if isinstance(value, list) and "list" in self.annotation:
            return value
        return coerce(self.name, value, declared)


def read_notebook(notebook: str | Path) -> nbformat.NotebookNode:
    """RunError for a file that is not there, naming its neighbours, or that is no notebook."""
    notebook = Path(notebook)
    try:
        return nbformat.read(notebook, as_version=4)
    except FileNotFoundError:
        near = sorted(p.name for p in notebook.parent.glob("*.ipynb")) if notebook.parent.is_dir() else []
        have = f"; {notebook.parent} has {', '.join(near)}" if near else ""
        raise RunError(f"there is no notebook {notebook}{have}") from None
    except Exception as error:  # nbformat raises many kinds
        raise RunError(f"{notebook} is not a notebook: {' '.join(str(error).split())[:200]}") from error


def declared_parameters(notebook: nbformat.NotebookNode) -> dict[str, Parameter]:
    """The parameters of a notebook in their order; empty when no cell is tagged. ConfigError for a broken cell."""
    cell = next(
        (c for c in notebook.cells if c.cell_type == "code" and TAG in c.metadata.get("tags", [])), None
    )
    if cell is None:
        return {}
    try:
        body = ast.parse(cell.source).body
    except SyntaxError as error:
        raise ConfigError(f"the parameters cell is not Python: line {error.lineno}: {error.msg}") from error
    lines = cell.source.splitlines()
    found = {}
    for node in body:
        if not isinstance(node, (ast.AnnAssign, ast.Assign)) or node.value is None:
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if not isinstance(target, ast.Name):
            continue
        try:
            default = ast.literal_eval(node.value)
        except ValueError:
            continue
        annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
        _, _, comment = lines[node.end_lineno - 1][node.end_col_offset :].partition("#")
        found[target.id] = Parameter(target.id, annotation, default, comment.strip())
    return found


def accepted_parameters(notebook: nbformat.NotebookNode) -> dict[str, Parameter]:
    """The declared parameters, and in a notebook that makes its settings from its variables every setting of a run."""
    declared = declared_parameters(notebook)
    if not any(c.cell_type == "code" and "RunConfig.from_namespace(globals()" in c.source for c in notebook.cells):
        return declared
    return {name: Parameter(name, "", None, "") for name in setting_names()} | declared


def check_parameters(declared: Mapping[str, Parameter], given: Mapping[str, Any],
                     also: Mapping[str, Parameter] | None = None) -> dict[str, Any]:
    """`given` with the declared types. ConfigError for an unknown name (with the nearest one) or a wrong value.

    Args:
        also: further names that are taken as they come (`accepted_parameters`); a message does not list them.
    """
    checked = {}
    for name, value in given.items():
        if name not in declared and name in (also or {}):
            checked[name] = value
            continue
        if name not in declared:
            near = difflib.get_close_matches(name, [*declared, *(also or {})], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            known = ", ".join(declared) or "none (it has no cell tagged 'parameters')"
            raise ConfigError(f"the notebook has no parameter {name!r}; {hint}Its parameters: {known}")
        checked[name] = declared[name].coerce(value)
    return checked


def help_text(declared: Mapping[str, Parameter]) -> str:
    """One line a parameter."""
    width = max((len(name) for name in declared), default=0)
    return "\n".join(
        f"  {p.name:<{width}}  {p.annotation or 'any'} = {p.default!r}{'  ' + p.help if p.help else ''}"
        for p in declared.values()
    )
