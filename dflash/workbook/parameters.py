"""A notebook's parameters cell: names, types, defaults and help as papermill reads them, and values by those types.

papermill warns about an unknown parameter and goes on with the default, and delivers `5_6` as 56 and `false` as a
true string. Here a wrong name or type is an error before anything runs.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from dflash.errors import ConfigError, RunError
from dflash.train.settings import RunConfig, nullable, setting_names, setting_value
from dflash.train.values import coerce, is_none

if TYPE_CHECKING:
    import nbformat
    from papermill.models import Parameter

TAG = "parameters"
INJECTED = "# Parameters\n"  # how papermill begins the cell that it puts after the parameters cell
MAKES_SETTINGS = "run_config(globals())"  # in a notebook that takes every setting of a run
_KINDS = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "list": list,
    "tuple": list,
    "dict": dict,
    "None": type(None),
}
_UNION = re.compile(r"^(\w+)\s*:\s*([^=#]*\|[^=#]*?)\s*=", re.MULTILINE)  # x: int | None =


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
    """papermill's view of the parameters cell, in its order; empty when no cell is tagged."""
    from papermill.translators import PythonTranslator  # not at the top: over a second, which a running notebook can save

    cell = next((c for c in notebook.cells if c.cell_type == "code" and TAG in c.metadata.get("tags", [])), None)
    if cell is None:
        return {}
    source = _UNION.sub(lambda m: f"{m[1]}: Union[{m[2].replace('|', ',')}] =", cell.source)  # papermill knows no `|`
    return {p.name: p for p in PythonTranslator.inspect({"source": source})}


def declared_types(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """The declared annotations by name; "None" where there is none."""
    return {name: parameter.inferred_type_name for name, parameter in declared_parameters(notebook).items()}


def extra_settings(notebook: nbformat.NotebookNode) -> list[str]:
    """Every setting of a run for a notebook that makes its settings from its variables, else nothing."""
    makes = any(c.cell_type == "code" and MAKES_SETTINGS in c.source for c in notebook.cells)
    return setting_names() if makes else []


def read_as(name: str, annotation: str, value: Any) -> Any:
    """`value` by an annotation such as "int", "Optional[float]" or "list[str]"; as it is where that says nothing.

    Raises: ConfigError naming the parameter, what was got and what was wanted.
    """
    words = set(re.findall(r"\w+", re.sub(r"\b(list|dict|tuple)\[[^]]*\]", r"\1", annotation)))
    if words <= {"None"} or words - _KINDS.keys() - {"Optional", "Union"}:
        return value
    kinds = [kind for word, kind in _KINDS.items() if word in words or (word == "None" and "Optional" in words)]
    kinds.sort(key=lambda kind: not isinstance(value, kind) or isinstance(value, bool) != (kind is bool))  # its own first
    try:
        return coerce(name, value, Union[tuple(kinds)])  # noqa: UP007
    except ConfigError as error:
        raise ConfigError(f"{error}; pass it with -y '{name}: ...'" if {list, dict} & set(kinds) else str(error)) from None


def check_parameters(
    declared: Mapping[str, str], given: Mapping[str, Any], settings: Collection[str] = ()
) -> dict[str, Any]:
    """`given` with the declared types. ConfigError for an unknown name (with the nearest one) or a wrong value.

    Args:
        declared: annotations by name.
        settings: names of settings that are taken too, by their own types; a message does not list them.
    """
    checked = {}
    for name, value in given.items():
        if name in settings:
            checked[name] = None if is_none(value) and not nullable(name) else setting_value(name, value)
        elif name in declared:
            checked[name] = read_as(name, declared[name], value)
        else:
            near = difflib.get_close_matches(name, [*declared, *settings], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            known = ", ".join(declared) or "none (it has no cell tagged 'parameters')"
            raise ConfigError(f"the notebook has no parameter {name!r}; {hint}Its parameters: {known}")
    return checked


def check_variables(namespace: dict[str, Any], settings: Collection[str] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The same check from inside a running notebook, for one that plain papermill started.

    IPython's `In` holds the cells that ran: the newest one with annotated lines declares the parameters, and the one
    after it is papermill's, if it is. Where there is no `In` nothing is checked. A notebook that Jupyter opened in
    `notebooks/` goes on in the folder above, where papermill is started.

    Args:
        namespace: the notebook's `globals()`; its own parameters are set to their declared types.

    Returns the declared names, and those that papermill set. Raises ConfigError as `check_parameters` does.
    """
    if Path.cwd().name == "notebooks" and Path("../dflash").is_dir():
        os.chdir("..")
    ran = list(namespace.get("In", ()))
    found = [_assigned(cell) for cell in ran]
    place = next((i for i in reversed(range(len(ran))) if any(found[i].values())), None)
    if place is None:
        return (), ()
    declared = {name: annotation for name, annotation in found[place].items() if annotation}
    after = ran[place + 1 : place + 2]
    passed = tuple(found[place + 1]) if after and after[0].startswith(INJECTED) else ()
    values = {name: namespace[name] for name in (*declared, *passed) if name in namespace}
    own = {name: value for name, value in values.items() if name not in settings}
    try:
        namespace.update(check_parameters(declared, own, settings))
    except ConfigError as error:
        hint = "; papermill reads -p values as numbers where it can, and passes text as it is with -r NAME VALUE"
        raise ConfigError(f"{error}{hint if 'must be str' in str(error) else ''}") from None
    return tuple(declared), passed


def run_config(namespace: dict[str, Any]) -> RunConfig:
    """A run's settings from a notebook's variables. What the parameters cell leaves at None is the recipe's; a None that
    was passed (`-p gamma None`) is a value.

    papermill injects a misspelt parameter with no more than a warning; so a variable that is nearly a setting's name, or
    nearly one of the notebook's own parameters, is refused.
    """
    settings = setting_names()
    declared, passed = check_variables(namespace, settings)
    known = {*settings, *declared}
    for name, value in namespace.items():
        if name.startswith("_") or name in known or not isinstance(value, (str, int, float, list, tuple, type(None))):
            continue
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
            raise ConfigError(f"unknown parameter {name!r}; did you mean {near[0]!r}?")
    given = {name: namespace[name] for name in settings if name in namespace}
    given = {n: v for n, v in given.items() if not (v is None and n not in passed) and (nullable(n) or not is_none(v))}
    return RunConfig.from_parameters(**given)


def _assigned(source: str) -> dict[str, str]:
    """The names that lines of a cell set, with their annotations; none for what is not Python."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return {}
    found = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ""
    return found


def help_text(declared: Mapping[str, Parameter]) -> str:
    """One line a parameter."""
    width = max((len(name) for name in declared), default=0)
    return "\n".join(
        f"  {p.name:<{width}}  {p.inferred_type_name} = {p.default}{'  ' + p.help if p.help else ''}"
        for p in declared.values()
    )
