"""`bench kinds`: train drafters of several kinds and seeds beside each other on one device, for the same minutes or steps.

    dflash bench kinds --kinds dflash dflash2 --seeds 0 1 2 --minutes 5 --device 0 --out out/kinds
    dflash bench kinds --device cpu --steps 40 --set pack_length=512 --set max_anchors=32

Every run is a process of its own (`dflash train`) with the same settings, so all of them slow each other down alike. At the
end a table has each kind's held-out acceptance length: mean and spread over seeds, the plain argmax and the oracle.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from dflash.bench.shapes import KINDS
from dflash.bench.timing import write_json
from dflash.errors import ConfigError
from dflash.runs.record import read_metrics
from dflash.runs.tables import Table
from dflash.train.settings import RunConfig

# The `gpu` recipe with larger packs and more layers.
SETTINGS = dict(pack_length=16384, max_anchors=2048, drafter_layers=6, lr=3e-3, checkpoint_every=0)


def run(args: argparse.Namespace) -> int:
    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"{out} is there already; name a new folder")
    settings = SETTINGS | {"gpus": args.device, "max_minutes": args.minutes}
    settings |= {"steps": args.steps} if args.steps else {}
    for text in args.set:
        name, _, value = text.partition("=")
        settings[name] = value
    points = [(kind, seed) for kind in args.kinds for seed in args.seeds]
    configs = {
        f"{kind}-{seed}": RunConfig.from_parameters("gpu", **(settings | KINDS[kind] | {"seed": seed})).to_dict()
        for kind, seed in points
    }
    out.mkdir(parents=True)
    processes = {name: _start(name, config, out) for name, config in configs.items()}
    end = time.monotonic() + 60 * args.limit
    while time.monotonic() < end and any(p.poll() is None for p in processes.values()):
        time.sleep(1)
    for process in processes.values():
        if process.poll() is None:
            process.terminate()
            process.wait()
    rows = [_read(kind, seed, out, processes[f"{kind}-{seed}"].returncode) for kind, seed in points]
    print(Table(rows))
    summary = [_summary(kind, [row for row in rows if row["kind"] == kind]) for kind in args.kinds]
    print(Table(summary))
    write_json(args.json, bench="kinds", settings=settings, runs=rows, kinds=summary)
    return int(any(row["exit"] for row in rows))


def _start(name: str, config: dict[str, Any], out: Path) -> subprocess.Popen:
    path = out / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, "-m", "dflash", "train", "--config", str(path), "--runs", str(out / name)]
    with open(out / f"{name}.log", "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _read(kind: str, seed: int, out: Path, code: int) -> dict[str, Any]:
    """The run's last held-out figures; the curve goes into the JSON."""
    found = sorted((out / f"{kind}-{seed}").glob("*/metrics.jsonl"))
    records = read_metrics(found[0].parent)[0] if found else []
    steps = [r for r in records if r["kind"] == "step"]
    evals = [r for r in records if r["kind"] == "eval"]
    last = evals[-1] if evals else {}
    names = ("acceptance_length", "argmax_length", "oracle_length")
    return {"kind": kind, "seed": seed, "exit": code, "steps": len(steps)} | {n: last.get(n) for n in names}


def _summary(kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    lengths = [row["acceptance_length"] for row in rows if row["acceptance_length"] is not None]
    return {
        "kind": kind,
        "runs": len(lengths),
        "mean": statistics.mean(lengths) if lengths else None,
        "lowest": min(lengths, default=None),
        "highest": max(lengths, default=None),
        "steps": round(statistics.mean(row["steps"] for row in rows)),
    }
