"""Execute a notebook's code cells in this process and save it with its outputs, where papermill is not installed.

    python tools/run_notebook.py notebooks/04_threaded_launch.ipynb out/04.ipynb -p devices cuda:0,cuda:1

Takes the same parameters as papermill's -p, checked against the declared names and the settings of a run. Text output
and displayed MIME bundles, updates included, are kept; widgets are not. Needs neither Jupyter nor IPython. Exit code 1
where a cell raises; what ran until then, and the traceback, are saved all the same.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import faulthandler
import io
import json
import os
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Tee(io.StringIO):
    """Collects what is printed and passes it on to the terminal."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)
        sys.__stdout__.flush()
        return super().write(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), dest="parameters")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds after which all stacks are printed and it ends")
    args = parser.parse_args()
    if args.limit:
        faulthandler.dump_traceback_later(args.limit, exit=True)
    out = args.out.resolve()
    notebook = json.loads(args.notebook.read_text())
    os.chdir(ROOT)
    shown: list[dict[str, Any]] = []
    install_display(shown)
    failed = run_cells(notebook, dict(args.parameters), shown)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(notebook, indent=1) + "\n")
    print(f"{'FAILED' if failed else 'ok'}: {out}")
    return int(failed)


def install_display(shown: list[dict[str, Any]]) -> None:
    """A stand-in for IPython.display whose `display` records bundles as notebook outputs; live plots update theirs."""

    class Handle:
        def __init__(self, output: dict[str, Any]) -> None:
            self.output = output

        def update(self, value: Any, raw: bool = False, metadata: dict | None = None, **_: Any) -> None:
            self.output.update(data=content(value, raw), metadata=metadata or {})

    def content(value: Any, raw: bool) -> dict[str, Any]:
        data = dict(value) if raw and isinstance(value, dict) else {"text/plain": str(value)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_()
        return data

    def display(*values: Any, raw: bool = False, metadata: dict | None = None, **_: Any) -> Handle | None:
        handle = None
        for value in values:
            data = content(value, raw)
            print(data.get("text/plain", ""), file=sys.__stdout__)
            shown.append({"output_type": "display_data", "data": data, "metadata": metadata or {}})
            handle = Handle(shown[-1])
        return handle

    class HTML:
        def __init__(self, data: str) -> None:
            self.data = data

        def _repr_html_(self) -> str:
            return self.data

    package, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    module.display, module.HTML, package.display = display, HTML, module
    package.get_ipython = lambda: types.SimpleNamespace(kernel=True, config={})  # there is a place to draw in
    package.version_info = (9, 0, 0, "")  # matplotlib asks
    sys.modules.update({"IPython": package, "IPython.display": module})


def run_cells(notebook: dict, parameters: dict[str, str], shown: list[dict]) -> bool:
    """Run the cells in order, filling in their outputs. Returns whether one failed."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for count, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), 1):
        source = "".join(cell["source"])
        if "parameters" in cell["metadata"].get("tags", []):
            source = with_parameters(source, parameters)
            cell["source"] = source
        shown.clear()
        printed, error, begin = Tee(), None, time.perf_counter()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(source, f"cell {count}", "exec"), namespace)
        except BaseException as caught:
            error = caught
        outputs: list[dict] = []
        if printed.getvalue():
            outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
        outputs.extend(dict(output) for output in shown)
        if error is not None:
            lines = traceback.format_exception(error)
            print("".join(lines), file=sys.__stdout__)
            outputs.append({"output_type": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": lines})
        seconds = round(time.perf_counter() - begin, 2)
        cell.update(execution_count=count, outputs=outputs)
        cell["metadata"]["seconds"] = seconds
        print(f"-- cell {count}: {seconds} s", file=sys.__stdout__, flush=True)
        if error is not None:
            return True
    return False


def with_parameters(source: str, parameters: dict[str, str]) -> str:
    """The parameters cell with new values, each read as a Python literal of the declared type. Settings of a run that the
    cell does not declare are added to it as text, which the run's config reads."""
    declared = {node.target.id: node for node in ast.parse(source).body if isinstance(node, ast.AnnAssign)}
    added = {name: text for name, text in parameters.items() if name not in declared and name in run_settings()}
    unknown = set(parameters) - set(declared) - set(added)
    if unknown:
        raise SystemExit(f"unknown parameter {sorted(unknown)}; known: {', '.join(declared)}")
    lines = source.splitlines()
    for name, text in parameters.items():
        if name in added:
            lines.append(f"{name} = {text!r}")
            continue
        node = declared[name]
        kind = ast.unparse(node.annotation)
        value = text if kind == "str" else ast.literal_eval(text)
        tail = lines[node.lineno - 1][node.end_col_offset :]
        lines[node.lineno - 1] = f"{name}: {kind} = {value!r}{tail}"
    return "\n".join(lines)


def run_settings() -> set[str]:
    """Names of every setting of a run."""
    sys.path.insert(0, str(ROOT))
    from dflash.train.settings import RunConfig

    return {name for section in RunConfig().to_dict().values() for name in section}


if __name__ == "__main__":
    sys.exit(main())
