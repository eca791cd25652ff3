"""The compile probes against several torch versions, each in an environment of its own.

    python tools/compile_matrix.py --versions 2.11.0 2.13.0 2.14.1 --work /tmp/compile-matrix --json matrix.json
    python tools/compile_matrix.py --interpreters /envs/a/bin/python /envs/b/bin/python

For each version a virtual environment is made under --work, torch and numpy are installed, the probes run with
protection off and on, and the environment is removed again (several GB for a CUDA build), so only one exists at a
time. Not part of CI. The table it prints is the one in docs/compile_safety.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "MATRIX "
CHILD = f"""
import json, sys, torch
from dataclasses import asdict
from dflash.diagnose.probes import run_probes
backend, device, limit = sys.argv[1], sys.argv[2], float(sys.argv[3])
rows = [asdict(result) for result in run_probes(backend=backend, device=device, limit=limit)]
print({MARK!r} + json.dumps({{"torch": torch.__version__, "rows": rows}}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="*", default=[], help="torch versions to install")
    parser.add_argument("--interpreters", nargs="*", default=[], type=Path, help="python of environments that exist")
    parser.add_argument("--work", type=Path, default=Path("/tmp/compile-matrix"))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one probe")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    results = [_probe(python, args) for python in args.interpreters]
    for version in args.versions:
        python = _environment(version, args.work)
        try:
            results.append(_probe(python, args))
        finally:
            shutil.rmtree(args.work / version, ignore_errors=True)
    print(render(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    protected = [row for result in results for row in result["rows"] if row["protected"]]
    return 1 if any(row["verdict"] not in ("clean", "skipped") for row in protected) else 0


def _environment(version: str, work: Path) -> Path:
    folder = work / version
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    print(f"installing torch {version} ...", flush=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", f"torch=={version}", "numpy"], check=True)
    return python


def _probe(python: Path, args: argparse.Namespace) -> dict:
    begin = time.perf_counter()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(python), "-c", CHILD, args.backend, args.device, str(args.limit)]
    output = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in output.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise SystemExit(f"{python}: no result\n{output.stdout[-2000:]}\n{output.stderr[-2000:]}")
    result = json.loads(lines[-1].removeprefix(MARK))
    print(f"torch {result['torch']}: {time.perf_counter() - begin:.0f} s", flush=True)
    return result


def render(results: list[dict]) -> str:
    """A Markdown table: one probe a row, one version a column, `off -> on`."""
    names = dict.fromkeys(row["name"] for result in results for row in result["rows"])
    lines = [
        "| probe (protection off -> on) | " + " | ".join(result["torch"] for result in results) + " |",
        "|---" * (len(results) + 1) + "|",
    ]
    for name in names:
        cells = []
        for result in results:
            verdict = {row["protected"]: row["verdict"] for row in result["rows"] if row["name"] == name}
            cells.append(f"{verdict.get(False, '-')} -> {verdict.get(True, '-')}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
