"""Count how often a cold, threaded launch fails: fresh processes x threads x empty compile cache.

    python tools/cold_threads.py --processes 50                           # CPU, protected and unprotected
    python tools/cold_threads.py --devices cuda:0 --processes 10          # one GPU, forward and backward
    python tools/cold_threads.py --devices cuda:0,cuda:1 --processes 10   # threads spread over two GPUs

Prints a line for each process and the counts last; writes JSON to --json, or to $OUT where that is set.
Exit code 0 where no protected process had a fault.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    from dflash.diagnose.coldrun import run_cold, to_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=10, help="fresh processes in each mode")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="calls of each thread in a process")
    parser.add_argument("--devices", default="cpu", help="comma-separated; threads are spread over them")
    parser.add_argument("--mode", choices=("protected", "unprotected", "both"), default="both")
    parser.add_argument("--unprotected-processes", type=int, default=None, help="default: --processes")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a process counts as hung")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for each mode; fewer processes then")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--noise", action="store_true", help="one more thread traces with FX in a loop")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    results = []
    for protect in [mode for mode in (True, False) if args.mode in ("both", "protected" if mode else "unprotected")]:
        name = "protected" if protect else "unprotected"
        count = args.processes if protect or args.unprotected_processes is None else args.unprotected_processes

        def say(index: int, outcome: str, seconds: float, name: str = name, count: int = count) -> None:
            print(f"{name} {index + 1}/{count}: {outcome} after {seconds:.1f} s", flush=True)

        results.append(
            run_cold(
                count,
                protect,
                args.devices.split(","),
                args.threads,
                args.repeats,
                args.limit,
                args.noise,
                budget=args.budget,
                on_process=say,
                jobs=args.jobs,
            )
        )
    print()
    for result in results:
        print(result)
        for outcome, detail in result.details.items():
            print(f"  first {outcome}: {detail[-1500:]}")
    target = args.json
    if target is None and os.environ.get("OUT"):
        target = Path(os.environ["OUT"]) / f"cold_threads_{args.devices.replace(':', '').replace(',', '_')}.json"
    if target:
        target.write_text(to_json(results) + "\n")
    return 1 if any(result.faults for result in results if result.protected) else 0


if __name__ == "__main__":
    sys.exit(main())
