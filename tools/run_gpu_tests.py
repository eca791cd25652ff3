"""Run the GPU cases of the compile-safe runtime, with pytest where it is installed and without it otherwise.

python tools/run_gpu_tests.py            # each case has its own time limit; a table comes last
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import importlib.util
import subprocess
import sys
import time
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULE = "test_compile_safety_gpu"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", help="run this one case in this process")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for one case")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if importlib.util.find_spec("pytest") is None:
        sys.modules["pytest"] = stand_in()
    cases = collect(importlib.import_module(MODULE))
    if args.case:
        faulthandler.dump_traceback_later(args.limit, exit=True)
        return run_one(*cases[args.case])
    rows = []
    for name in cases:
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, __file__, name, "--limit", str(args.limit)], cwd=ROOT)
        verdict = {0: "passed", 5: "skipped"}.get(done.returncode, "FAILED")
        rows.append((verdict, name, time.perf_counter() - begin))
        print(f"{verdict} {name}", flush=True)
    print()
    for verdict, name, seconds in rows:
        print(f"{verdict:<8} {seconds:6.1f} s  {name}")
    return int(any(verdict == "FAILED" for verdict, *_ in rows))


def collect(module: types.ModuleType) -> dict[str, tuple]:
    """name -> (function, arguments, reason to skip it or '')."""
    cases = {}
    for name, function in vars(module).items():
        if not name.startswith("test_"):
            continue
        marks = getattr(function, "pytestmark", [])
        skip = next(
            (
                mark.kwargs.get("reason", "skipped")
                for mark in (*module.pytestmark, *marks)
                if mark.name == "skipif" and mark.args[0]
            ),
            "",
        )
        grid = next((mark.args for mark in marks if mark.name == "parametrize"), None)
        for value in grid[1] if grid else [None]:
            label = name if value is None else f"{name}[{value}]"
            cases[label] = (function, {} if value is None else {grid[0]: value}, skip)
    return cases


def run_one(function, arguments: dict, skip: str) -> int:
    """0 passed, 1 failed, 5 skipped."""
    from compile_helpers import clean_compiler

    if skip:
        print(f"skipped: {skip}")
        return 5
    around = clean_compiler()
    next(around)
    try:
        function(**arguments)
    except BaseException:
        traceback.print_exc()
        return 1
    next(around, None)
    return 0


def stand_in() -> types.ModuleType:
    """As much of pytest as the GPU cases use: marks and fixtures that only leave a note on the function."""
    module = types.ModuleType("pytest")

    class Mark:
        def __init__(self, name: str, args: tuple = (), kwargs: dict | None = None) -> None:
            self.name, self.args, self.kwargs = name, args, kwargs or {}

        def __call__(self, *args, **kwargs):
            if len(args) == 1 and isinstance(args[0], types.FunctionType) and not kwargs:
                args[0].pytestmark = [*getattr(args[0], "pytestmark", []), self]
                return args[0]
            return Mark(self.name, args, kwargs)

    class Marks:
        def __getattr__(self, name: str) -> Mark:
            return Mark(name)

    module.mark = Marks()
    module.fixture = lambda *args, **kwargs: lambda function: function
    return module


if __name__ == "__main__":
    sys.exit(main())
