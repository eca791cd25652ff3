"""Write what the docs repeat from the code: the README's tree and docs/settings.md. `tests/test_docs.py` says when to."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPEN, CLOSE = "<!-- tree: written by tools/write_docs.py -->\n", "<!-- /tree -->"
SETTINGS = """# Settings

Every setting of a run, written from [`dflash/train/settings.py`](../dflash/train/settings.py) by `tools/write_docs.py`. Pass
any of them as `-p name value` to papermill or `dflash run`, and as `--set name=value` to `dflash train`. Empty text, `None`
and `null` mean None. A setting without a default of its own comes from the recipe: `-p recipe gpu` names one of the files in
[`dflash/recipes`](../dflash/recipes), and `auto` takes `cpu` without a GPU, `gpu` for the packaged target, else `large`.
"""


def tree() -> str:
    """The rooms in the order of their imports, each with the first line of its docstring."""
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    rooms = [name for name in reversed(layers) if (ROOT / "dflash" / name / "__init__.py").exists()]
    lines = []
    for room in rooms:
        says = ast.get_docstring(ast.parse((ROOT / "dflash" / room / "__init__.py").read_text())) or ""
        lines.append(f"{room + '/':<16} {says.splitlines()[0] if says else ''}".rstrip())
    return "```\n" + "\n".join(lines) + "\n```\n"


def readme() -> str:
    """The README with its tree as it should be."""
    text = (ROOT / "README.md").read_text()
    before, rest = text.split(OPEN)
    return before + OPEN + tree() + CLOSE + rest.split(CLOSE, 1)[1]


def settings() -> str:
    """docs/settings.md: a table for each section of `RunConfig`."""
    source = (ROOT / "dflash/train/settings.py").read_text()
    lines, parts = source.splitlines(), [SETTINGS]
    for section in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        if not section.name.endswith("Options"):
            continue
        title = ast.get_docstring(section).splitlines()[0].rstrip(".")
        parts.append(f"\n## {title}\n\n| setting | default | what it does |\n|---|---|---|")
        for node in section.body:
            if isinstance(node, ast.AnnAssign):
                default = f"`{ast.unparse(node.value)}`" if node.value is not None else _by_recipe(node.target.id)
                says = re.search(r"  # (.*)$", lines[node.end_lineno - 1])
                parts.append(f"| `{node.target.id}` | {default} | {says.group(1).replace('|', '/') if says else ''} |")
    return "\n".join(parts) + "\n"


def _by_recipe(name: str) -> str:
    """The recipes' values of a setting that has no default of its own."""
    found = []
    for file in sorted((ROOT / "dflash" / "recipes").glob("*.yaml")):
        value = re.search(rf"^  {name}: *([^#\n]*)", file.read_text(), re.M)
        if value:
            found.append(f"{file.stem} `{value.group(1).strip()}`")
    return ", ".join(found) or "must be given"


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme())
    (ROOT / "docs/settings.md").write_text(settings())
