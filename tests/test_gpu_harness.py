"""tools/gpu_harness.py: a part that fails, hangs or dies costs only itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
SCRIPT = """
import os, sys, time
from gpu_harness import OUT, Harness, command_line
HARNESS = Harness(__file__, starts=2)

def a():
    HARNESS.attempt("a", "fine", 5, lambda: {"ok": True, "threads": os.environ["OMP_NUM_THREADS"], "start": first()})
    HARNESS.attempt("a", "raises", 5, lambda: {}["missing"])
    HARNESS.attempt("a", "hangs", 1, lambda: time.sleep(60))
    if first():
        (OUT / "started").touch()
        os._exit(7)
    HARNESS.attempt("a", "after", 5, lambda: {"ok": True})

def first():
    return not (OUT / "started").exists()

def b(number):
    def lost():
        raise RuntimeError(f"CUDA error: {number}")
    HARNESS.attempt("b", "lost", 5, lost)
    HARNESS.attempt("b", "next process", 5, lambda: {"ok": True})

args = command_line(__doc__, 60, ["a", "b"])
if args.part:
    HARNESS.work(args, {"a": a, "b": b})
    sys.exit()
HARNESS.clear()
with open(OUT / "log.txt", "w") as log:
    for part in ("a", "b:5"):
        if not args.only or part[0] in args.only:
            HARNESS.run_process(part, args.seconds, log)
"""


def run(folder: Path, *options: str, **environment: str) -> list[dict]:
    """Rows of the script above, run with these options."""
    (folder / "script.py").write_text(SCRIPT)
    kept = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, str(folder / "script.py"), *options],
        capture_output=True,
        text=True,
        timeout=60,
        env=kept | {"PYTHONPATH": str(TOOLS), "OUT": str(folder / "out")} | environment,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "out" / "results.jsonl").read_text().splitlines()]


def test_failures_hangs_and_deaths_cost_only_themselves(tmp_path):
    rows = run(tmp_path)
    assert [(r["part"], r["name"], r["ok"]) for r in rows] == [
        ("a", "fine", True),
        ("a", "raises", False),
        ("a", "hangs", False),
        ("a", "start 1", False),
        ("a", "after", True),
        ("b", "lost", False),
        ("b:5", "start 1", False),
        ("b", "next process", True),
    ]
    assert rows[0]["start"] is True, "what has a row is not done again"
    assert [rows[i]["error"] for i in (1, 3, 5)] == [
        "KeyError: 'missing'",
        "the process ended with 7; see log.txt",
        "RuntimeError: CUDA error: 5",
    ]
    assert "TooSlow" in rows[2]["error"] and rows[2]["wall"] < 10 and "in <lambda>" in rows[2]["traceback"]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not tell which cores are ours")
def test_a_child_gets_an_eighth_of_the_cores_unless_told(tmp_path):
    wanted = max(1, len(os.sched_getaffinity(0)) // 8)
    (tmp_path / "told").mkdir()
    assert run(tmp_path, "--only", "a")[0]["threads"] == str(wanted)
    assert run(tmp_path / "told", "--only", "a", OMP_NUM_THREADS="3")[0]["threads"] == "3"
    sys.path.insert(0, str(TOOLS))
    try:
        import gpu_harness
    finally:
        sys.path.remove(str(TOOLS))
    assert [gpu_harness.threads_for(cores) for cores in (1, 7, 16, 32)] == [1, 1, 2, 4]


def test_no_time_left_is_a_row_and_starts_nothing(tmp_path):
    (row,) = run(tmp_path, "--seconds", "5", "--only", "b")
    assert (row["part"], row["ok"], row["error"]) == ("b:5", False, "no time left")
