"""Measurements that print a table and write JSON: kernels, a step, the target, the pipeline.

Each bench is a module with `add_parser(subparsers)`; add a line to `BENCHES` to register one.
"""

from __future__ import annotations

BENCHES = {
    "step": "dflash.bench.step",
    "kinds": "dflash.bench.kinds",
    "attention": "dflash.bench.attention",
    "target": "dflash.bench.target",
    "pipeline": "dflash.bench.pipeline",
}
