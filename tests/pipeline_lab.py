"""Shared by the pipeline's tests: stamped packs, the serial reference, and the same job under torchrun."""

from __future__ import annotations

import pickle
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from patience import PATIENCE
from torch import Tensor

from dflash.bench.pipeline_case import Case, make_planner, make_replica, make_target
from dflash.compile_safety import protected
from dflash.devices import on
from dflash.distributed.cluster import workers
from dflash.launch.torchrun import child_environment, torchrun_command
from dflash.target.capture import Features
from dflash.target.features import OnlineFeatures
from dflash.train.plan import StepPlan, WorkItem
from dflash.train.step import Replica, SerialEngine
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


def weights_of(replica: Replica) -> Tensor:
    """All float32 master weights in one row, on the CPU."""
    return torch.cat([m.detach().flatten().cpu() for m in replica.optimizer.masters])


def serial_run(case: Case, topology: Topology, steps: int) -> tuple[list[float], Tensor]:
    """The reference: the same target device, one drafter, no workers."""
    target = make_target(case, topology.targets[0][0])
    planner = make_planner(case)
    engine = SerialEngine(make_replica(case, target, topology.drafters[0]), OnlineFeatures(target), planner)
    with on(topology.drafters[0]), protected(engine.warmup_jobs(planner.step(1))):
        losses = [float(engine.step(planner.step(n), case.lr)[0]) for n in range(1, steps + 1)]
    return losses, weights_of(engine.replica)


def run_torchrun(case: Case, topology: Topology, steps: int, depth: int = 2, **job) -> SimpleNamespace:
    """The same job under torchrun: exit code, output, and what rank 0 saved (`result`, None when it failed)."""
    with tempfile.TemporaryDirectory() as folder:
        out, path = Path(folder) / "result.pt", Path(folder) / "job.pickle"
        job |= {"case": case, "topology": topology, "steps": steps, "depth": depth, "out": str(out)}
        path.write_bytes(pickle.dumps(job))
        done = subprocess.run(
            torchrun_command(workers(topology), [str(Path(__file__).with_name("pipeline_rank.py")), str(path)]),
            env=child_environment(),
            timeout=PATIENCE,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return SimpleNamespace(code=done.returncode, output=done.stdout, result=torch.load(out) if out.exists() else None)
