"""`bench pipeline`: targets and drafters alone, then together, and which split of the same GPUs would be best."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import cycle

import torch

from dflash.bench.pipeline_case import Case, make_engine, make_packs, make_planner, make_replica, make_target, target_flops
from dflash.bench.shapes import SHAPES
from dflash.bench.timing import (
    StepClock,
    Timing,
    environment,
    free_memory,
    matmul_ceiling,
    measure,
    refuse_hours,
    write_json,
)
from dflash.bench.workload import matmul_flops
from dflash.compile_safety import protected
from dflash.devices import on, one_host_thread
from dflash.distributed.accounting import Rates, advice
from dflash.distributed.threads import PipelineEngine
from dflash.runs.sampler import resident_bytes
from dflash.runs.tables import Table
from dflash.target.features import OnlineFeatures
from dflash.train.settings import RuntimeOptions
from dflash.train.step import Replica
from dflash.train.topology import CPU, Topology, decide

REPEATS = 3  # timed calls of a stage alone
_TOO_FAST = 1.5  # a pipeline above this share of its slower side shows that a stage alone was measured too slow


def memory_now(devices) -> dict[str, dict[str, int | None]]:
    """Bytes allocated, reserved and at most allocated, by device; the process's resident bytes on the CPU."""
    found = {}
    for device in devices:
        if device.type == "cuda":
            found[str(device)] = {
                "allocated": torch.cuda.memory_allocated(device),
                "reserved": torch.cuda.memory_reserved(device),
                "peak": torch.cuda.max_memory_allocated(device),
            }
        else:
            found[str(device)] = {"allocated": resident_bytes(), "reserved": None, "peak": None}
    return found


def measure_target(case: Case, target, ceiling: float) -> dict:
    """One target with nothing to wait for, on one pack after another."""
    source, packs = OnlineFeatures(target), cycle(make_packs(case))
    with on(target.device), one_host_thread([target.device]):
        timing = measure(lambda: source.get(next(packs)), target.device, 1, REPEATS)
    return _stage(timing, case.shape.tokens, target_flops(case, target) / ceiling)


def _stage(timing: Timing, tokens: int, ideal: float) -> dict:
    """A pack of `tokens` took `timing`; its matrix products alone would take `ideal` seconds."""
    found = {"tokens_per_second": tokens / timing.median, "seconds": timing.median}
    return found | {"mfu": ideal / timing.median, "peak_bytes": timing.peak_bytes}


def measure_drafter(case: Case, target, replica: Replica, ceiling: float) -> dict:
    """One drafter with its features at hand: forward, backward and optimizer."""
    plan = make_planner(case).step(1)
    item = plan.items[0]
    features = OnlineFeatures(target).get(item.pack).to(replica.device)

    def step() -> None:
        replica.accumulate(item, features, plan.denominator)
        replica.apply(0.0, plan)

    with on(replica.device), one_host_thread([replica.device]):
        timing = measure(step, replica.device, 2, REPEATS)
    return _stage(timing, case.shape.tokens, matmul_flops(case.shape, case.soft_labels) / ceiling)


def run_steps(
    engine: PipelineEngine, steps: int, topology: Topology, lr: float, warm: int = 3, sample_every: int = 0
) -> dict:
    """Drive an engine under full protection; throughput is from the end of step `warm` to the end of the last but one.

    Losses are read one step behind, as training does, so that both ends lie in a running pipeline. Where the targets may
    go on after the last step (`make_engine`'s `steps` is larger), its queue is as full at the one end as at the other.

    Returns: losses, seconds and tokens per second of the timed steps, seconds of each step from the second on (`steps`),
    seconds of the warmup, memory by device (`samples`: every `sample_every` steps), and each worker's busy and waiting
    seconds.
    """
    samples, tokens, clock = [], 0, StepClock()
    plans, began = engine.planner, time.perf_counter()
    try:
        with one_host_thread(topology.devices), protected(engine.warmup_jobs(plans.step(1))):
            engine.start(1)
            for number in range(1, steps + 1):
                plan = plans.step(number)
                clock.add(engine.step(plan, lr))
                tokens += plan.tokens if warm < number < steps else 0  # those whose ends are timed
                if sample_every and number >= warm and (number - warm) % sample_every == 0:
                    samples.append(memory_now(topology.devices))
            losses = clock.read()
            memory = memory_now(topology.devices)
            engine.verify()
    finally:
        engine.close()
    ledgers = {
        ledger.name: {"busy": ledger.busy, "wait": ledger.waiting, "tokens": ledger.tokens, "phases": dict(ledger.seconds)}
        for ledger in (*engine.target_ledgers, *engine.drafter_ledgers)
    }
    seconds, timed = clock.seconds(warm), steps - 1 - warm
    return {
        "losses": [row[0] for row in losses],
        "tokens_per_second": tokens / timed / seconds if seconds else None,
        "step_seconds": seconds,
        "steps": clock.each(),
        "warm_seconds": clock.end(warm) - began,
        "memory": memory,
        "samples": samples,
        "workers": ledgers,
        "finite": all(row[-1] == 1.0 for row in losses),
    }


def measure_pipeline(case: Case, topology: Topology, steps: int, depth: int = 2) -> dict:
    """Both stages alone, then the pipeline, and how close it comes to its slower side."""
    target = make_target(case, topology.targets[0][0])
    replica = make_replica(case, target, topology.drafters[0])
    ceilings = {}
    for device in (target.device, replica.device):
        with on(device):
            ceilings[device] = matmul_ceiling(device, case.dtype)
    result = {"target": measure_target(case, target, ceilings[target.device])}
    free_memory(target.device)
    result["drafter"] = measure_drafter(case, target, replica, ceilings[replica.device])
    replica = Replica(replica.drafter, case.options)  # moments as new, like those of the other replicas
    free_memory(replica.device)
    for device in topology.devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
    engine = make_engine(case, topology, steps + depth + 2, depth, target=target, replica=replica)
    result["pipeline"] = run_steps(engine, steps, topology, case.lr, warm=min(depth + 2, steps - 2))
    rates = Rates(result["target"]["tokens_per_second"], result["drafter"]["tokens_per_second"])
    fed, eaten = len(topology.targets) * rates.target, len(topology.drafters) * rates.drafter
    if topology.shared:
        fed = eaten = len(topology.drafters) / (1 / rates.target + 1 / rates.drafter)
    result["slower_side"] = min(fed, eaten)
    result["bound_by"] = "both in turn" if topology.shared else "targets" if fed < eaten else "drafters"
    result["of_slower_side"] = result["pipeline"]["tokens_per_second"] / result["slower_side"]
    result["pipeline"]["seconds"] = case.shape.tokens / result["pipeline"]["tokens_per_second"]  # a pack, as above
    result["cpu_workers"] = cpu_workers(topology)
    result["rates"] = vars(rates)
    result["ceilings"] = {str(d): c for d, c in ceilings.items()}
    return result


def least_seconds(case: Case, topology: Topology, steps: int) -> float:
    """What the matrix products of `measure_pipeline` take the CPU, over all its workers."""
    packs, flops = steps * case.packs_per_step, 0.0
    if any(device.type == "cpu" for devices in topology.targets for device in devices):
        flops += (packs + REPEATS + 2) * target_flops(case, make_target(case, torch.device("meta")))
    if any(device.type == "cpu" for device in topology.drafters):
        flops += (packs + REPEATS + 2) * matmul_flops(case.shape, case.soft_labels)
    return flops / matmul_ceiling(CPU, case.dtype) if flops else 0.0


def cpu_workers(topology: Topology) -> int:
    """Workers that compute on the CPU at the same time; a drafter and a target that take turns are one."""
    targets = () if topology.paired else [device for devices in topology.targets for device in devices]
    return sum(device.type == "cpu" for device in (*topology.drafters, *targets))


def table(result: dict) -> str:
    """The stages and the pipeline, a line each."""
    rows, p = [], result["pipeline"]
    for name in ("target", "drafter", "pipeline"):
        r = result[name]
        peak = None if r.get("peak_bytes") is None else r["peak_bytes"] / 2**30
        rows.append((name, f"{r['tokens_per_second']:,.0f}", f"{r['seconds']:.3f}", r.get("mfu"), peak))
    lines = [str(Table(rows, ("stage", "tokens/s", "s a pack", "MFU", "peak GiB")))]
    lines.append(f"the pipeline reaches {result['of_slower_side']:.1%} of its slower side ({result['bound_by']})")
    if result["cpu_workers"] > 1:
        lines.append(
            f"{result['cpu_workers']} CPU workers share the cores of one machine, so the percentage of the slower "
            "side says nothing about devices"
        )
    lines.append(
        str(Table([(name, w["busy"], w["wait"]) for name, w in p["workers"].items()], ("worker", "busy s", "wait s")))
    )
    gib = [{"device": d, **{f"{k} GiB": v and v / 2**30 for k, v in m.items()}} for d, m in p["memory"].items()]
    return "\n".join([*lines, *([str(Table(gib))] if gib else [])])


def run(args: argparse.Namespace) -> int:
    topology = decide(RuntimeOptions(gpus=args.gpus, target_gpus=args.target_gpus))
    drafters = len(topology.drafters)
    dtype = (
        getattr(torch, args.dtype)
        if args.dtype
        else (torch.bfloat16 if topology.drafters[0].type == "cuda" else torch.float32)
    )
    case = Case(
        SHAPES[args.shape or ("medium" if torch.cuda.is_available() else "tiny")],
        args.target_layers,
        args.hybrid,
        args.labels == "soft",
        dtype,
        packs=max(4, 2 * drafters),
        packs_per_step=args.packs_per_step or drafters,
    )
    if args.tokens:
        case = replace(case, shape=replace(case.shape, tokens=args.tokens))
    if CPU in topology.devices:
        refuse_hours(lambda: least_seconds(case, topology, args.steps), CPU, "--shape tiny, or fewer --tokens or --steps")
    print(topology.table())
    result = measure_pipeline(case, topology, args.steps, args.queue_depth)
    print(table(result))
    if args.advise is not None and result["of_slower_side"] > _TOO_FAST:
        print(
            f"no advice: the pipeline was {result['of_slower_side']:.1f} times as fast as its stages alone allow: others "
            "used this machine while those were measured; measure again when it is quiet"
        )
    elif args.advise is not None:
        gpus = args.advise or max(2, len(topology.devices))
        print(advice(gpus, Rates(**result["rates"]), (gpus - drafters, drafters)))
    write_json(
        args.json,
        bench="pipeline",
        shape=vars(case.shape),
        target_layers=case.target_layers,
        hybrid=case.hybrid,
        topology=str(topology),
        queue_depth=args.queue_depth,
        environment=environment(topology.drafters[0]),
        **result,
    )
    return 0
