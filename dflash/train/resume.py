"""What a checkpoint of a run holds, and how a run goes on from it as if it had never stopped.

Packs, their order and their anchors are pure functions of the settings and the step (`plan`), and nothing else in
training draws a random number, so the step is the whole state of every worker's generator and of the data position.
Weights, masters and moments are the same on every replica, so one copy is saved (of a sharded drafter: its shards, each
once), and a run may go on with another number of drafters, sharded or not, in threads or under torchrun alike.

The record (`metrics.jsonl`) goes back to where it stood when the checkpoint was made: what came after it is moved to
`superseded.jsonl`, so that no step is on record twice, and a `resume` record says so.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.drafter.storage import read_settings
from dflash.errors import ResumeError
from dflash.runs.record import METRICS_NAME, SUPERSEDED_NAME, Run
from dflash.train.checkpoint import checkpoint_facts, latest_checkpoint, newest_state, save_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflash.train.loop import Trainer
    from dflash.train.plan import Planner
    from dflash.train.settings import RunConfig
    from dflash.train.step import Engine

SUPERSEDED = SUPERSEDED_NAME
_DECISIVE = ("step", "eval", "fault", "run_end")  # the record is cut only where one of these is past the checkpoint


def save_training(run: Run, config: RunConfig, engine: Engine, trainer: Trainer, step: int) -> Path:
    """The checkpoint of a run at `step`; call it when every record up to that step is written."""
    replica = engine.replica
    state = {
        "optimizer": replica.optimizer.state_dict(),
        "trainer": trainer.state_dict(),
        "plan": plan_fingerprint(engine.planner),
    }
    facts = {
        "acceptance_length": trainer.acceptance_at(step),
        "metrics_offset": run.metrics.offset,
        "dtypes": [config.target.target_dtype, config.train.dtype],
    }
    with engine.whole() as drafter:
        return save_checkpoint(
            run.path,
            step,
            drafter,
            config.target.target,
            state,
            keep=config.train.keep_checkpoints,
            facts=facts,
            write_shards=engine.write_shards,
        )


def refuse_resume(run_path: str | os.PathLike[str], config: RunConfig) -> None:
    """Raises ResumeError where a run cannot go on with these settings, before anything is loaded: no checkpoint, another
    target, a drafter of another shape."""
    folder = latest_checkpoint(run_path)
    before, drafter = read_settings(folder), config.drafter
    if Path(before["target"]).name != Path(config.target.target).name:  # a folder may have moved
        raise ResumeError(
            f"{folder} was trained for the target {before['target']}, the settings say "
            f"{config.target.target}; a drafter fits its own target only: put it back, or start a new run"
        )
    if drafter.start_from is not None:
        return  # the shape is that drafter's, whatever the settings say
    layers, captured, wanted = before["config"]["num_hidden_layers"], before["target_layer_ids"], config.target.target_layers
    differs = []
    if layers != drafter.drafter_layers:
        differs.append(("drafter_layers", layers, drafter.drafter_layers))
    if wanted is not None and list(wanted) != captured:
        differs.append(("target_layers", captured, list(wanted)))
    if wanted is None and config.target.num_captured < len(captured):  # a small target has fewer than asked for
        differs.append(("num_captured", len(captured), config.target.num_captured))
    for name, was, now in differs:
        raise ResumeError(f"{folder} has {name} {was}, the settings say {now}; put it back, or start a new run")


def load_training(run: Run, say: Callable[[str], None] = lambda line: None, whole: bool = True) -> dict[str, Any]:
    """State of the newest checkpoint that can be read, with the run's record put back to it. `state["step"]` is its step.

    Args:
        whole: as for `load_trainer_state`.
    """
    folder, state = newest_state(run.path, whole, say)
    torn = sorted(p.name for p in folder.parent.iterdir() if p.is_dir() and p.name > folder.name)
    if torn:
        say(f"passed over, not complete: {', '.join(torn)}")
    rewind_record(run, folder)
    return state


def same_plan(state: dict[str, Any], planner: Planner) -> str | None:
    """What to say where the steps to come are not those that the checkpoint's run would have taken; None when they
    are."""
    if state.get("plan") in (None, plan_fingerprint(planner)):
        return None
    return (
        "the data, its packing or the plan's settings differ from the checkpoint's: the run goes on, but it is not the "
        "unbroken run"
    )


def plan_fingerprint(planner: Planner) -> str:
    """Hash of what decides the packs and anchors of every step."""
    parts: list[Any] = [
        planner.seed,
        planner.packs_per_step,
        planner.block_size,
        planner.max_anchors,
        planner.reduction,
        planner.soft_labels,
        planner.decay.tolist(),
    ]
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=12)
    for pack in planner.packs:
        digest.update(repr((pack.pack_id, int(pack.input_ids.sum()), pack.num_tokens, int(pack.loss_mask.sum()))).encode())
    return digest.hexdigest()


def rewind_record(run: Run, folder: Path) -> int:
    """Put `metrics.jsonl` back to where it stood at a checkpoint; returns how many records were set aside.

    First the cut part is on disk in `superseded.jsonl`, then the file is cut in place (ranks may hold it open, and
    append): a kill in between leaves the record whole. Does nothing when nothing came after the checkpoint.
    """
    facts = checkpoint_facts(folder)
    path = run.path / METRICS_NAME
    data = path.read_bytes()
    start = _cut_at(data, facts["step"], facts.get("metrics_offset"))
    lines = data[start:].splitlines(keepends=True)
    records = [_record(line) for line in lines]
    if not any(r.get("kind") in _DECISIVE for r in records):
        return 0
    with open(run.path / SUPERSEDED, "ab") as aside:
        aside.write(data[start:] if data.endswith(b"\n") else data[start:] + b"\n")
        aside.flush()
        os.fsync(aside.fileno())
    kept = [
        line
        for line, r in zip(lines, records, strict=True)
        if r.get("kind") == "checkpoint" and r.get("step", facts["step"] + 1) <= facts["step"]
    ]
    os.truncate(path, start)
    with open(path, "ab", buffering=0) as file:
        file.write(b"".join(kept))
    ends = [r for r in records if r.get("kind") in ("fault", "run_end")]
    said = [f"{r['kind']}: {r.get('status') or r.get('type')} {r.get('message') or ''}".strip()[:300] for r in ends]
    steps = sum(r.get("kind") == "step" for r in records)
    run.metrics.write(
        "resume",
        step=facts["step"],
        superseded=len(records) - len(kept),
        superseded_steps=steps,
        before=said,
        kept_in=SUPERSEDED,
    )
    return len(records) - len(kept)


def _cut_at(data: bytes, step: int, offset: int | None) -> int:
    """Where the record of a checkpoint's run ends: its offset, else the first step past it."""
    if offset is not None and 0 < offset <= len(data) and data[offset - 1 : offset] == b"\n":
        return offset
    at = 0
    for line in data.splitlines(keepends=True):
        record = _record(line)
        if record.get("kind") in ("step", "eval") and record.get("step", 0) > step:
            return at
        at += len(line)
    return at


def _record(line: bytes) -> dict[str, Any]:
    """A line as a record; an empty one where it is torn."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
