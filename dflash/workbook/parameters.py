"""A notebook's parameters cell, read without running it: names, declared types, defaults, help.

papermill warns about an unknown parameter and goes on with the default, and delivers `5_6` as 56 and `false` as a
true string. Here a wrong name or type is an error before anything runs.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.errors import ConfigError, RunError
from dflash.train.settings import coerce, setting_names

if TYPE_CHECKING:
    import nbformat

TYPES = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "tuple": tuple}
TAG = "parameters"
INJECTED = "# Parameters\n"  # how papermill begins the cell that it puts after the parameters cell


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
    import nbformat  # not at the top: a notebook that checks its own variables needs none

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
    cell = next((c for c in notebook.cells if c.cell_type == "code" and TAG in c.metadata.get("tags", [])), None)
    if cell is None:
        return {}
    try:
        return _assigned(cell.source)
    except SyntaxError as error:
        raise ConfigError(f"the parameters cell is not Python: line {error.lineno}: {error.msg}") from error


def _assigned(source: str) -> dict[str, Parameter]:
    """The variables that lines of a cell set to plain values. SyntaxError for what is not Python."""
    body = ast.parse(source).body
    lines = source.splitlines()
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


def check_parameters(
    declared: Mapping[str, Parameter], given: Mapping[str, Any], also: Collection[str] = ()
) -> dict[str, Any]:
    """`given` with the declared types. ConfigError for an unknown name (with the nearest one) or a wrong value.

    Args:
        also: further names that are taken as they come (`accepted_parameters`); a message does not list them.
    """
    checked = {}
    for name, value in given.items():
        if name not in declared and name in also:
            checked[name] = value
            continue
        if name not in declared:
            near = difflib.get_close_matches(name, [*declared, *also], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            known = ", ".join(declared) or "none (it has no cell tagged 'parameters')"
            raise ConfigError(f"the notebook has no parameter {name!r}; {hint}Its parameters: {known}")
        checked[name] = declared[name].coerce(value)
    return checked


def check_variables(namespace: dict[str, Any], also: Collection[str] = ()) -> tuple[str, ...]:
    """The same check from inside a running notebook, for one that plain papermill started.

    IPython's `In` holds the cells that ran: the newest one with annotated lines declares the parameters, and the one
    after it is papermill's, if it is. Where there is no `In` nothing is checked.

    Args:
        namespace: the notebook's `globals()`; its parameters are set to their declared types.
        also: names that are taken as they come, because something else checks them (`setting_names`).

    Returns the declared names. Raises ConfigError as `check_parameters` does.
    """
    cells = list(namespace.get("In", ()))
    for place in reversed(range(len(cells))):
        declared = {name: p for name, p in _assigned_or_none(cells[place]).items() if p.annotation}
        if declared:
            break
    else:
        return ()
    after = cells[place + 1] if place + 1 < len(cells) else ""
    given = [*declared, *(_assigned_or_none(after) if after.startswith(INJECTED) else ())]
    types = {name: replace(p, annotation="") if name in also else p for name, p in declared.items()}
    try:
        namespace.update(check_parameters(types, {name: namespace[name] for name in given if name in namespace}, also))
    except ConfigError as error:
        hint = "; papermill reads -p values as numbers where it can, and passes text as it is with -r NAME VALUE"
        raise ConfigError(f"{error}{hint if 'must be str' in str(error) else ''}") from None
    return tuple(declared)


def _assigned_or_none(source: str) -> dict[str, Parameter]:
    try:
        return _assigned(source)
    except SyntaxError:
        return {}


def help_text(declared: Mapping[str, Parameter]) -> str:
    """One line a parameter."""
    width = max((len(name) for name in declared), default=0)
    return "\n".join(
        f"  {p.name:<{width}}  {p.annotation or 'any'} = {p.default!r}{'  ' + p.help if p.help else ''}"
        for p in declared.values()
    )
