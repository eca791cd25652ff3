"""What a pipeline must keep on real devices: every element crosses, losses are the serial ones, memory is flat, and a
failing worker ends the run at once. Each check returns a dict with `ok` and the numbers behind it."""

from __future__ import annotations

import gc
import itertools
import pickle
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from dflash.bench.pipeline import memory_now, on, run_steps
from dflash.bench.pipeline_case import Case, make_engine, make_packs, make_planner, make_replica, make_target, weights_of
from dflash.compile_safety import protected
from dflash.distributed.cluster import workers
from dflash.distributed.threads import PipelineEngine
from dflash.launch.torchrun import child_environment, torchrun_command
from dflash.target.capture import Features
from dflash.target.features import OnlineFeatures
from dflash.target.spread import shard_target
from dflash.train.plan import StepPlan, WorkItem
from dflash.train.step import SerialEngine
from dflash.train.topology import Topology

_STALL = 400_000  # device cycles, about 0.2 ms: long enough for an unordered copy to show


class StampSource:
    """Features whose every element says which pack and which place it is; the captured tensors are fresh each time and
    dropped at once, so a copy that is not ordered reads what came later."""

    def __init__(self, device: torch.device, width: int):
        self.device, self.width, self.calls = device, width, 0

    def get(self, pack) -> Features:
        self.calls += 1
        if self.device.type == "cuda" and self.calls % 3 == 0:
            torch.cuda._sleep(_STALL)
        return stamp(pack.pack_id, len(pack.input_ids), self.width, self.device)


def stamp(number: int, tokens: int, width: int, device: torch.device) -> Features:
    """float32, exact: below 2**24."""
    base = torch.arange(tokens * width, device=device, dtype=torch.float32).view(1, tokens, width)
    return Features((base + 977 * number) % 8_388_608, ((base + 131 * number) % 65_536)[..., : width // 3])


class StampReplica:
    """Stands where a drafter stands: compares what arrives, and sums item numbers as its gradient."""

    def __init__(self, device: torch.device, width: int):
        self.device, self.width = device, width
        self.options = SimpleNamespace(soft_labels=True)
        self.drafter = SimpleNamespace(attention_backend="none")
        self.optimizer = SimpleNamespace(
            masters=[torch.zeros(1000, device=device)], gradients=[torch.zeros(1000, device=device)]
        )
        self.seen = 0

    def accumulate(self, item: WorkItem, features: Features, denominator: float) -> Tensor:
        self.seen += 1
        if self.device.type == "cuda" and self.seen % 4 == 0:
            torch.cuda._sleep(2 * _STALL)
        wanted = stamp(item.pack.pack_id, len(item.pack.input_ids), self.width, self.device)
        wrong = (features.all_hidden_states != wanted.all_hidden_states).sum()
        wrong = wrong + (features.verifier_last_hidden != wanted.verifier_last_hidden).sum()
        self.optimizer.gradients[0].add_(float(item.index + 1))
        return wrong.double().reshape(1)

    def apply(self, lr: float, plan: StepPlan) -> Tensor:
        """[elements of the summed gradient that are not the sum of the step's item numbers, 1]."""
        total = float(sum(item.index + 1 for item in plan.items))
        wrong = (self.optimizer.gradients[0] != total).sum().double()
        self.optimizer.gradients[0].zero_()
        return torch.stack([wrong, torch.ones((), dtype=torch.float64, device=self.device)])


class StampPlanner:
    """A stream of numbered packs."""

    def __init__(self, per_step: int, tokens: int):
        self.per_step, self.tokens = per_step, torch.zeros(tokens, dtype=torch.int64)

    def step(self, step: int) -> StepPlan:
        first = (step - 1) * self.per_step
        items = [
            WorkItem(
                i,
                0,
                SimpleNamespace(pack_id=i, input_ids=self.tokens, lengths=torch.tensor([len(self.tokens)])),
                None,
                1.0,
                1,
            )
            for i in range(first, first + self.per_step)
        ]
        return StepPlan(step, tuple(items), 1.0)


def check_stamps(topology: Topology, packs: int, depth: int, tokens: int = 1024, width: int = 768) -> dict:
    """`packs` stamped packs from targets to drafters; also that summed gradients are exact."""
    drafters = len(topology.drafters)
    steps = -(-packs // drafters)
    engine = PipelineEngine(
        [StampReplica(d, width) for d in topology.drafters],
        [StampSource(t[0], width) for t in topology.targets],
        [t[0] for t in topology.targets],
        StampPlanner(drafters, tokens),
        steps,
        queue_depth=depth,
        paired=topology.paired,
    )
    began, wrong, wrong_sums = time.perf_counter(), [], []
    try:
        engine.start(1)
        for number in range(1, steps + 1):
            values = engine.step(engine.planner.step(number), 0.0)
            wrong.append(values[0])
            wrong_sums.append(values[1])
        mismatches, sums = int(torch.stack(wrong).sum()), int(torch.stack(wrong_sums).sum())
    finally:
        engine.close()
    crossed = sum(replica.seen for replica in engine.replicas)
    return {
        "ok": mismatches == 0 and sums == 0 and crossed == steps * drafters,
        "packs": crossed,
        "depth": depth,
        "mismatched_elements": mismatches,
        "wrong_gradient_sums": sums,
        "seconds": time.perf_counter() - began,
        "reduction": engine.reduce.how,
        "elements_a_pack": tokens * (width + width // 3),
    }


def serial_run(case: Case, topology: Topology, steps: int) -> tuple[list[float], Tensor]:
    """The reference: the same target device, one drafter, no workers."""
    target = make_target(case, topology.targets[0][0])
    engine = SerialEngine(make_replica(case, target, topology.drafters[0]), OnlineFeatures(target))
    planner = make_planner(case)
    with on(topology.drafters[0]), protected(engine.warmup_jobs(planner.step(1))):
        losses = [float(engine.step(planner.step(n), case.lr)[0]) for n in range(1, steps + 1)]
    return losses, weights_of(engine.replica)


def check_equal(case: Case, topology: Topology, steps: int = 20, tolerance: float = 0.02) -> dict:
    """Losses of the pipeline against the serial reference; the reference against itself is the noise."""
    wanted, final = serial_run(case, topology, steps)
    again, final_again = serial_run(case, topology, steps)
    engine = make_engine(case, topology, steps)
    result = run_steps(engine, steps, topology, case.lr, warm=1)
    got, weights = result["losses"], weights_of(engine.replica)
    start = weights_of(make_replica(case, make_target(case, topology.targets[0][0]), topology.drafters[0]))
    moved = float((final - start).norm())
    worst = max(abs(a - b) / abs(a) for a, b in zip(wanted, got, strict=True))
    noise = max(abs(a - b) / abs(a) for a, b in zip(wanted, again, strict=True))
    return {
        "ok": worst <= tolerance and wanted[-1] < wanted[0] and result["finite"],
        "loss_first": wanted[0],
        "loss_last": wanted[-1],
        "pipeline_loss_last": got[-1],
        "worst_relative_difference": worst,
        "serial_against_itself": noise,
        "weights_part": float((weights - final).norm()) / moved,
        "weights_part_serial": float((final_again - final).norm()) / moved,
        "reduction": engine.reduce.how,
        "step_seconds": result["step_seconds"],
    }


def run_torchrun(case: Case, topology: Topology, steps: int, depth: int = 2, timeout: float = 120.0, **job) -> dict:
    """The same job under torchrun: exit code, seconds, output, and what rank 0 saved (`result`, None when it failed)."""
    with tempfile.TemporaryDirectory() as folder:
        out, path = Path(folder) / "result.pt", Path(folder) / "job.pickle"
        path.write_bytes(
            pickle.dumps(
                {
                    "case": case,
                    "topology": topology,
                    "steps": steps,
                    "depth": depth,
                    "out": str(out),
                    "timeout": timeout,
                    **job,
                }
            )
        )
        command = torchrun_command(workers(topology), ["-m", "dflash.bench.pipeline_rank", str(path)])
        began = time.monotonic()
        done = subprocess.run(
            command, env=child_environment(), timeout=timeout, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return {
            "code": done.returncode,
            "seconds": time.monotonic() - began,
            "output": done.stdout,
            "result": torch.load(out) if out.exists() else None,
        }


def check_torchrun(case: Case, topology: Topology, steps: int = 20, tolerance: float = 0.02, sharded: bool = False) -> dict:
    """Losses of the ranks against the serial reference. `sharded`: the ranks hold one drafter together."""
    wanted, final = serial_run(case, topology, steps)
    ran = run_torchrun(case, topology, steps, sharded=sharded)
    if ran["result"] is None:
        return {"ok": False, "error": f"torchrun ended with {ran['code']}: {ran['output'][-1500:]}"}
    got = ran["result"]["losses"]
    worst = max(abs(a - b) / abs(a) for a, b in zip(wanted, got, strict=True))
    shards = len(topology.drafters) if sharded else 1
    held = ran["result"]["held"] / final.numel()  # of the masters, by rank 0
    return {
        "ok": worst <= tolerance and ran["code"] == 0 and abs(held * shards - 1) < 0.05,
        "held": held,
        "peak_bytes": ran["result"].get("peak"),
        "worst_relative_difference": worst,
        "loss_last": wanted[-1],
        "torchrun_loss_last": got[-1],
        "step_seconds": ran["result"]["step_seconds"],
        "seconds": ran["seconds"],
        "weights_part": float((ran["result"]["weights"] - final).norm() / final.norm()),
    }


def check_spread(case: Case, topology: Topology, steps: int = 10, tolerance: float = 0.02) -> dict:
    """A target spread over the devices of `topology.targets[0]`: its features against those of the target in one piece,
    element by element, and the losses of a run with it against the serial reference; all captured the plain way."""
    case = replace(case, fast_capture=False)
    devices = topology.targets[0]
    wanted, final = serial_run(case, topology, steps)
    target = make_target(case, devices[0])
    packs = make_packs(case)
    whole = [OnlineFeatures(target).get(pack).to("cpu") for pack in packs]
    target.model.to("cpu")
    shard_target(target, devices)
    pairs = [
        pair
        for one, pack in zip(whole, packs, strict=True)
        for two in (OnlineFeatures(target).get(pack).to("cpu"),)
        for pair in ((one.all_hidden_states, two.all_hidden_states), (one.verifier_last_hidden, two.verifier_last_hidden))
    ]
    wrong = sum(int((a != b).sum()) for a, b in pairs)
    worst = max(float((a.float() - b.float()).norm() / a.float().norm()) for a, b in pairs)
    engine = make_engine(case, topology, steps, target=target)
    result = run_steps(engine, steps, topology, case.lr, warm=1)
    losses = max(abs(a - b) / abs(a) for a, b in zip(wanted, result["losses"], strict=True))
    held: dict[str, int] = {}
    for weight in target.model.parameters():
        held[str(weight.device)] = held.get(str(weight.device), 0) + weight.nbytes
    return {
        "ok": worst <= tolerance and losses <= tolerance and len(held) == len(set(devices)) and result["finite"],
        "mismatched_elements": wrong,
        "elements": sum(a.numel() for a, _ in pairs),
        "worst_features": worst,
        "worst_relative_difference": losses,
        "weight_bytes": held,
        "tokens_per_second": result["tokens_per_second"],
        "weights_part": float((weights_of(engine.replica) - final).norm() / final.norm()),
    }


def check_memory(case: Case, topology: Topology, steps: int = 200, every: int = 10) -> dict:
    """Reserved and peak memory of every device from the tenth step on: moves at most 2%."""
    for device in topology.devices:
        if device.type == "cuda":
            torch.zeros(1, device=device)  # a device without an allocation yet has no peak to reset
            torch.cuda.reset_peak_memory_stats(device)
    engine = make_engine(case, topology, steps)
    result = run_steps(engine, steps, topology, case.lr, warm=10, sample_every=every)
    moved, shown = {}, {}
    for device in map(str, topology.devices):
        for what in ("reserved", "peak") if device != "cpu" else ("allocated",):
            values = [sample[device][what] for sample in result["samples"]]
            moved[f"{device} {what}"] = max(values) / min(values) - 1
            shown[f"{device} {what}"] = max(values)
    return {
        "ok": max(moved.values()) <= 0.02,
        "steps": steps,
        "moved": moved,
        "bytes": shown,
        "tokens_per_second": result["tokens_per_second"],
        "workers": result["workers"],
    }


def check_failure(case: Case, topology: Topology) -> dict:
    """A target that raises in the middle: how long until the caller has its exception, and what stays allocated."""
    calls = itertools.count()

    class Failing:
        def __init__(self, source):
            self.source = source

        def get(self, pack):
            if next(calls) == 6:
                failed.append(time.monotonic())
                raise OSError("a made-up failure")
            return self.source.get(pack)

    failed: list[float] = []
    engine = make_engine(case, topology, 100, wrap=lambda source, i: Failing(source) if i == 0 else source)
    names, seconds = [], None
    try:
        run_steps(engine, 100, topology, case.lr)
    except OSError as error:
        seconds = time.monotonic() - failed[0]
        trace = error.__traceback__
        while trace is not None:
            names.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        del trace
    del engine
    gc.collect()
    for device in topology.devices:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.empty_cache()
    left = {d: m["allocated"] for d, m in memory_now(topology.devices).items()}
    freed = all(value < 128 << 20 for d, value in left.items() if d != "cpu")
    return {
        "ok": seconds is not None and seconds < 10 and "get" in names and freed,
        "seconds": seconds,
        "left_allocated": left,
        "frames": names[-4:],
    }
