"""Small notebooks for tests of the launcher, the report and the dashboard."""

from __future__ import annotations

from pathlib import Path

import nbformat


def write_notebook(path: Path, parameters: str, *cells: str) -> Path:
    """A notebook with a tagged parameters cell and the given code cells."""
    notebook = nbformat.v4.new_notebook()
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    first = nbformat.v4.new_code_cell(parameters)
    first.metadata["tags"] = ["parameters"]
    notebook.cells = [nbformat.v4.new_markdown_cell("# A test"), first]
    notebook.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(notebook, path)
    return path


def outputs(path: Path) -> list[tuple[int, nbformat.NotebookNode]]:
    """(cell index, output) of every output in a notebook."""
    notebook = nbformat.read(path, as_version=4)
    return [(i, o) for i, c in enumerate(notebook.cells) for o in c.get("outputs", [])]
