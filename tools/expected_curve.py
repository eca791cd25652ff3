"""The `expected:` block of a recipe file, from runs of it: `python tools/expected_curve.py "two cores" runs/a runs/b`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dflash.runs.record import read_metrics  # noqa: E402

MARGIN = 0.06


def curve(folder: str, hardware: str) -> dict:
    """Held-out acceptance length by step, and on what."""
    records = read_metrics(folder)[0]
    torch = next(r for r in records if r["kind"] == "run_start")["environment"]["packages"]["torch"].split("+")[0]
    found = {r["step"]: round(r["acceptance_length"], 3) for r in records if r["kind"] == "eval"}
    return {"measured": f"{hardware}, torch {torch}, {max(found):,} steps", "acceptance": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hardware")
    parser.add_argument("runs", nargs="+")
    options = parser.parse_args()
    curves = [curve(folder, options.hardware) for folder in options.runs]
    print(yaml.safe_dump({"expected": {"margin": MARGIN, "curves": curves}}, sort_keys=False), end="")


if __name__ == "__main__":
    main()
