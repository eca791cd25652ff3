"""`dflash replay --run runs/<id> --step N`: one step of a run again, slowly and with every question asked.

The packs, anchors and weights of a step are pure functions of the run's settings and the step; the weights before it
come from the newest checkpoint before it, and the steps in between are taken again as the run took them. Then the one
step runs in float32 with anomaly detection, pack by pack, so that it is known which pack, which anchors and which
operation gave the first number that is not finite.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from dflash.devices import device_named
from dflash.errors import RunError
from dflash.runs.record import plain, read_metrics
from dflash.target.features import FeatureSource
from dflash.train.checkpoint import checkpoints, load_trainer_state
from dflash.train.optimizer import learning_rate
from dflash.train.plan import Planner, WorkItem
from dflash.train.resolve import recall
from dflash.train.settings import RunConfig
from dflash.train.step import Replica, SerialEngine

if TYPE_CHECKING:
    from dflash.target.capture import Features

Say = Callable[[str], None]
_UNRECORDED = 2  # steps that a run which crashed may have begun after the last one on its record


@dataclass
class ReplayedPack:
    """One item of the step. `bad` names what was not finite; `origin` is the operation that anomaly detection blames."""

    pack_id: int
    documents: int
    anchors: list[int]
    supervised_slots: int
    features_finite: bool
    largest_feature: float
    loss: float
    gradient_norm: float
    bad: list[str] = field(default_factory=list)
    origin: str | None = None


@dataclass
class Replay:
    """What came of it. `checkpoint_step` 0: from the drafter's start."""

    step: int
    checkpoint_step: int
    weights_finite: bool
    loss: float
    gradient_norm: float
    recorded: dict
    packs: list[ReplayedPack]

    @property
    def finite(self) -> bool:
        return self.weights_finite and math.isfinite(self.gradient_norm) and not any(p.bad for p in self.packs)

    def table(self) -> str:
        """The result in words, one line a pack."""
        start = f"checkpoint of step {self.checkpoint_step}" if self.checkpoint_step else "the drafter's start"
        lines = [
            f"step {self.step} in float32, from {start}: loss {self.loss:.6g}, gradient norm {self.gradient_norm:.6g}, "
            + ("everything finite" if self.finite else "NOT FINITE")
        ]
        if self.recorded:
            lines.append(
                f"  on record: loss {self.recorded.get('loss')}, gradient norm {self.recorded.get('grad_norm')}, "
                f"skipped {self.recorded.get('skipped')} ({self.recorded.get('reason')})"
            )
        if not self.weights_finite:
            lines.append("  a weight was not finite before this step")
        for p in self.packs:
            shown = ", ".join(map(str, p.anchors[:8])) + (", ..." if len(p.anchors) > 8 else "")
            lines.append(
                f"  pack {p.pack_id}: {p.documents} documents, {len(p.anchors)} anchors ({shown}), "
                f"{p.supervised_slots} supervised slots, loss {p.loss:.6g}, gradient norm {p.gradient_norm:.6g}, "
                f"largest feature {p.largest_feature:.4g}"
            )
            if p.bad:
                lines.append(f"    not finite: {', '.join(p.bad[:6])}" + (f"; first in {p.origin}" if p.origin else ""))
        return "\n".join(lines)


def replay_step(
    step: int,
    planner: Planner,
    source: FeatureSource,
    replica: Replica,
    total: int,
    first_step: int = 1,
    say: Say = lambda line: None,
    rates: Mapping[int, float] = MappingProxyType({}),
) -> tuple[bool, list[ReplayedPack], float, float]:
    """Take steps `first_step` .. `step` - 1 with `replica`, then `step` in float32.

    Args:
        replica: with the weights and moments before `first_step`; its drafter is float32 afterwards.
        total: planned steps of the run, which the learning rate follows. rates: the recorded ones of its steps.

    Returns (weights finite before the step, packs, loss, gradient norm).
    """
    engine, options = SerialEngine(replica, source, planner), replica.options
    for earlier in range(first_step, step):
        lr = rates.get(earlier) or learning_rate(earlier, total, *options.schedule_parts())
        engine.step(planner.step(earlier), lr)
        if (earlier - first_step) % 50 == 49:
            say(f"at step {earlier}, on the way to {step}")
    slow = in_float32(replica)
    weights_finite = bool(slow.optimizer.all_finite())
    plan = planner.step(step)
    packs = [replay_item(slow, item, source.get(item.pack), plan.denominator or 1.0) for item in plan.items]
    norm = float(torch.nn.utils.get_total_norm(slow.optimizer.gradients)) if slow.optimizer.gradients else 0.0
    return weights_finite, packs, sum(p.loss for p in packs), norm


def in_float32(replica: Replica) -> Replica:
    """A replica that computes in float32 from the masters of another, in the same drafter."""
    masters = [m.detach().clone() for m in replica.optimizer.masters]
    drafter = replica.drafter.float()
    with torch.no_grad():
        for parameter, master in zip((p for p in drafter.parameters() if p.requires_grad), masters, strict=True):
            parameter.copy_(master)
    return Replica(drafter, replace(replica.options, dtype="float32"))


def replay_item(replica: Replica, item: WorkItem, features: Features, denominator: float) -> ReplayedPack:
    """Forward and backward of one item under anomaly detection; its gradient joins the others'."""
    names = [n for n, p in replica.drafter.named_parameters() if p.requires_grad]
    hidden = features.all_hidden_states
    features = features.to(torch.float32)
    anchors = item.anchors.positions[item.anchors.valid].tolist()
    found = ReplayedPack(
        item.pack.pack_id,
        len(item.pack.lengths),
        anchors,
        item.supervised_slots,
        bool(torch.isfinite(hidden).all()),
        float(hidden.float().abs().max()),
        float("nan"),
        float("nan"),
    )
    if not found.features_finite:
        rows = (~torch.isfinite(hidden[0])).any(-1).nonzero().flatten().tolist()
        found.bad.append(f"target features at {len(rows)} positions, first {rows[0]}")
    try:
        with warnings.catch_warnings(record=True) as told, torch.autograd.detect_anomaly(check_nan=True):
            warnings.simplefilter("always")
            loss, _ = replica.loss(item, features, denominator)
            found.loss = float(loss.detach())
            loss.backward()
    except RuntimeError as error:
        if "nan" not in str(error).lower():
            raise
        found.origin = str(error).splitlines()[0] + _forward_line(told)
        for p in replica.optimizer.parameters:
            p.grad = None
        with torch.autograd.set_detect_anomaly(False):
            loss, _ = replica.loss(item, features, denominator)
            found.loss = float(loss.detach())
            loss.backward()
    if not math.isfinite(found.loss):
        found.bad.append("loss")
    gradients = [p.grad for p in replica.optimizer.parameters]
    found.bad += [
        f"gradient of {n}"
        for n, g in zip(names, gradients, strict=True)
        if g is not None and not bool(torch.isfinite(g).all())
    ]
    found.gradient_norm = float(torch.nn.utils.get_total_norm([g for g in gradients if g is not None]))
    replica.optimizer.accumulate()
    return found


def _forward_line(told: list[warnings.WarningMessage]) -> str:
    """Where the forward pass made the operation that anomaly detection blames: our innermost line in its traceback."""
    ours = [
        line.strip()
        for w in told
        for line in str(w.message).splitlines()
        if "/dflash/" in line and line.strip().startswith("File") and "/replay.py" not in line
    ]
    return f" (made in the forward pass at {ours[-1].removeprefix('File ')})" if ours else ""


def replay(run_path: str | Path, step: int, device: str = "cpu", say: Say = lambda line: None, walk: bool = True) -> Replay:
    """One step of a run again; also written to `replay-step-N.json` in the run folder.

    Args:
        walk: take the steps between the checkpoint and `step` again; False starts from the checkpoint's weights as they
            are, which is quick and not exact.

    Raises: RunError, before anything is loaded, for a step that the run did not come to.
    """
    from dflash.train.prepare import prepare

    run_path = Path(run_path)
    config = RunConfig.load(run_path / "config.yaml")
    if not 1 <= step <= config.train.steps:
        raise RunError(f"the run at {run_path} has steps 1 to {config.train.steps}, got step {step}")
    recorded = _recorded(run_path, step)
    rates = {at: record["lr"] for at, record in recorded.items()}
    resolved = recall(run_path).on_one(device_named(device))
    prepared = prepare(resolved, say)
    replica, total = Replica(prepared.drafter, resolved.config.train), config.train.steps
    before = [(at, path) for at, path in checkpoints(run_path) if at < step]
    start, folder = before[-1] if before else (0, None)
    if folder is not None:
        state = load_trainer_state(folder)
        replica.optimizer.load_state_dict(state["optimizer"])
        total = state["trainer"]["total"]
        say(f"from the checkpoint of step {start}")
    first = start + 1 if walk else step
    finite, packs, loss, norm = replay_step(step, prepared.planner, prepared.source, replica, total, first, say, rates)
    result = Replay(step, start, finite, loss, norm, recorded.get(step, {}), packs)
    (run_path / f"replay-step-{step}.json").write_text(json.dumps(plain(asdict(result)), indent=1))
    return result


def _recorded(run_path: Path, step: int) -> dict[int, dict]:
    """The newest record of each step, where there is one: a run may have failed in `step`. RunError where it never came to
    it."""
    records, _ = read_metrics(run_path)
    if not records:
        raise RunError(f"{run_path} has no record (metrics.jsonl) of any step; give the folder of a run that was trained")
    steps = [r for r in records if r["kind"] == "step"]
    last = max((r["step"] for r in steps), default=0)
    if step > last + _UNRECORDED:
        raise RunError(f"the record of {run_path} ends at step {last}, got step {step}; give one that was taken")
    return {r["step"]: r for r in steps}
