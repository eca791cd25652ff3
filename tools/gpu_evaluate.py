"""Evaluate a drafter on a GPU in one go: bfloat16 and float32, greedy and sampled, full and short drafts.

    python tools/gpu_evaluate.py --run runs/<id> [--limit 32] [--max-new-tokens 192]

Ends itself after --minutes; prints the stacks when it hangs; the table comes last. Writes evaluation-*.json to $OUT
when that is set, else to the run folder.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dflash.evaluate.whole import EvaluateOptions, evaluate, table, write_evaluation

CASES = {
    "float32-greedy": {"dtype": "float32"},
    "bfloat16-greedy": {"dtype": "bfloat16"},
    "bfloat16-greedy-3-drafts": {"dtype": "bfloat16", "max_draft": 3, "parity_responses": 0},
    "bfloat16-sampled": {"dtype": "bfloat16", "temperature": 0.7, "parity_responses": 0},
}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--run", required=True)
    p.add_argument("--limit", type=int, default=32)
    p.add_argument("--max-new-tokens", type=int, default=192)
    p.add_argument("--device", default="auto")
    p.add_argument("--minutes", type=float, default=8.0)
    args = p.parse_args()
    faulthandler.dump_traceback_later(args.minutes * 60, exit=True)
    out = Path(os.environ.get("OUT") or args.run)
    tables, began = [], time.monotonic()
    for name, changes in CASES.items():
        if time.monotonic() - began > 0.7 * args.minutes * 60:
            tables.append(f"== {name}: left out, the time is up")
            continue
        start = time.monotonic()
        options = EvaluateOptions(
            run=args.run, limit=args.limit, max_new_tokens=args.max_new_tokens, device=args.device, **changes
        )
        summary = evaluate(options, say=lambda line: None)
        write_evaluation(summary, out / f"evaluation-{name}.json")
        tables.append(f"== {name} ({time.monotonic() - start:.0f} s)\n{table(summary)}")
        print(tables[-1], flush=True)
    print("\n\n".join(["", "ALL", *tables]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
