"""Print what the protection adds to a warm compiled call while nobody traces, in microseconds.

    python tools/gate_overhead.py            # goal: below 20 us

Writes gate_overhead.json to $OUT where that is set. Exit code 0 below 20 microseconds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
BOUND_US = 20.0


def main() -> int:
    import torch

    from dflash.diagnose.overhead import measure_gate_overhead

    result = {"torch": torch.__version__, **measure_gate_overhead()}
    print(json.dumps(result))
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "gate_overhead.json").write_text(json.dumps(result) + "\n")
    return 0 if result["overhead_us"] < BOUND_US else 1


if __name__ == "__main__":
    sys.exit(main())
