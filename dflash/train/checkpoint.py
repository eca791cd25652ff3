"""Checkpoints that are whole or not there.

    runs/<id>/checkpoints/step-00000200/
        drafter.safetensors, drafter.json   the drafter alone, what decoding and export read
        trainer.pt                          float32 masters, moments, step; read with weights_only
        shards/                             masters and moments instead, where the drafter is sharded (`shards`)
        complete.json                       written last; names every file with its size

A checkpoint is written beside its final name, flushed to disk, marked complete and renamed. A folder without a true
mark is not a checkpoint, and is never trusted however new it is (vllm-project/speculators#739). Kept are the newest few
and the one whose held-out acceptance length was best. One process writes a run's checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dflash.drafter.model import DFlashDrafter
from dflash.drafter.storage import save_drafter
from dflash.errors import ResumeError, RunError
from dflash.train import shards

TRAINER = "trainer.pt"
MARK = "complete.json"
_ASIDE = ".before"  # ending of a checkpoint that makes room for a new one of its step
_NAME = re.compile(r"step-(\d{8})$")


def checkpoint_folder(run_path: str | Path, step: int) -> Path:
    return Path(run_path) / "checkpoints" / f"step-{step:08d}"


def save_checkpoint(
    run_path: str | Path,
    step: int,
    drafter: DFlashDrafter,
    target_name: str,
    state: Mapping[str, Any],
    keep: int = 2,
    facts: Mapping[str, Any] | None = None,
    write_shards: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Write the checkpoint of `step` and drop all but the newest `keep` complete ones and the best.

    Args:
        state: what training needs to go on; plain values and tensors.
        facts: plain values for the mark, read without loading the state. `acceptance_length` (held out, at this step)
            decides which one is the best; `metrics_offset` is where the run's record stood.
        write_shards: has every rank write its shards, where there are any, into the folder it is given; RunError where one
            cannot.

    Raises: RunError when the disk refuses, with the older checkpoints untouched.
    """
    final = checkpoint_folder(run_path, step)
    beside = final.with_name(f".{final.name}.{os.getpid()}.part")
    aside = final.with_name(f".{final.name}{_ASIDE}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save_drafter(drafter, beside, target_name)
        torch.save({"step": step, **state}, beside / TRAINER)
        write_shards(beside / shards.FOLDER)
        if (beside / shards.FOLDER).exists():
            _flush(beside / shards.FOLDER)
        files = sorted(p for p in beside.rglob("*") if p.is_file())
        for path in files:
            _flush(path)
        sizes = {p.relative_to(beside).as_posix(): p.stat().st_size for p in files}
        (beside / MARK).write_text(json.dumps({"step": step, **(facts or {}), "files": sizes}))
        _flush(beside / MARK)
        _flush(beside)
        if final.exists():  # the same step again: the old one is whole until the new one has its name
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        beside.rename(final)
        _flush(final.parent)
        shutil.rmtree(aside, ignore_errors=True)
    except (OSError, RuntimeError, RunError, SafetensorError) as error:  # torch and safetensors wrap what the disk says
        shutil.rmtree(beside, ignore_errors=True)
        _put_back(Path(run_path))
        raise RunError(
            f"the checkpoint of step {step} could not be written to {final.parent}: {error}. Earlier checkpoints are "
            "untouched; make room and resume"
        ) from error
    prune(run_path, keep)
    return final


def _put_back(run_path: Path) -> None:
    """Give a checkpoint that was set aside its name again, where the new one of its step never got it."""
    for aside in (run_path / "checkpoints").glob(f".step-*{_ASIDE}"):
        final = aside.with_name(aside.name.removeprefix(".").removesuffix(_ASIDE))
        if not is_complete(final) and is_complete(aside):
            shutil.rmtree(final, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):  # another rank was faster
                aside.rename(final)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_complete(folder: Path) -> bool:
    """Whether every file that the mark names is there with its size."""
    try:
        files = json.loads((folder / MARK).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def checkpoints(run_path: str | Path) -> list[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints, oldest first."""
    root = Path(run_path) / "checkpoints"
    found = [(int(m.group(1)), p) for p in root.glob("step-*") if (m := _NAME.fullmatch(p.name))]
    return sorted((step, path) for step, path in found if is_complete(path))


def latest_checkpoint(run_path: str | Path) -> Path:
    """The newest complete checkpoint. Raises ResumeError when there is none, naming incomplete ones."""
    _put_back(Path(run_path))
    complete = checkpoints(run_path)
    if complete:
        return complete[-1][1]
    torn = [p.name for p in (Path(run_path) / "checkpoints").glob("*") if p.is_dir()]
    more = f"; incomplete: {', '.join(sorted(torn))}" if torn else ""
    raise ResumeError(
        f"{run_path} holds no complete checkpoint{more}; train on from another run, or start this one anew "
        "under another run_id"
    )


def checkpoint_facts(folder: str | Path) -> dict[str, Any]:
    """What a complete checkpoint's mark says: `step`, and the facts given when it was saved."""
    mark = json.loads((Path(folder) / MARK).read_text())
    return {name: value for name, value in mark.items() if name != "files"}


def best_checkpoint(run_path: str | Path) -> Path | None:
    """The complete checkpoint with the best held-out acceptance length, the newest of equals; None when no checkpoint
    was evaluated at its step."""
    scored = []
    for step, path in checkpoints(run_path):
        length = checkpoint_facts(path).get("acceptance_length")
        if isinstance(length, (int, float)):
            scored.append((length, step, path))
    return max(scored)[2] if scored else None


def load_trainer_state(folder: str | Path, whole: bool = True) -> dict[str, Any]:
    """`trainer.pt` of a complete checkpoint, on the CPU. Raises RunError for an incomplete one.

    Args:
        whole: put shards together, so that `optimizer` is what a whole drafter loads; False leaves it as it lies there.
    """
    folder = Path(folder)
    if not is_complete(folder):
        raise RunError(f"{folder} is not a complete checkpoint; use the newest complete one of its run")
    state = torch.load(folder / TRAINER, map_location="cpu", weights_only=True)
    if whole and state.get("optimizer", {}).get("sharded"):
        state["optimizer"] = shards.read_whole(folder / shards.FOLDER, state["optimizer"])
    return state


def newest_state(
    run_path: str | Path, whole: bool = True, say: Callable[[str], None] = lambda line: None
) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint whose state can be read, and its state; one that is complete by its sizes and cannot be read
    is skipped and reported.

    Args:
        whole: as for `load_trainer_state`.

    Raises: ResumeError when there is none; OSError where the disk does not answer.
    """
    latest_checkpoint(run_path)
    damaged = []
    for _, folder in reversed(checkpoints(run_path)):
        try:
            return folder, load_trainer_state(folder, whole)
        except (MemoryError, OSError):  # says nothing against the checkpoint
            raise
        except Exception as error:  # whatever torch says to bytes that are not its own
            damaged.append(folder.name)
            say(f"passed over, damaged: {folder.name} ({type(error).__name__}: {' '.join(str(error).split())[:120]})")
    raise ResumeError(
        f"no checkpoint of {run_path} can be read: {', '.join(damaged)}; start the run anew under another "
        "run_id, with start_from one of them if its drafter.safetensors is whole"
    )


def prune(run_path: str | Path, keep: int) -> None:
    """Delete complete checkpoints beyond the newest `keep` and the best, and what a killed save left behind."""
    best = best_checkpoint(run_path)
    for _, path in checkpoints(run_path)[:-keep]:
        if path != best:
            shutil.rmtree(path, ignore_errors=True)
    _put_back(Path(run_path))
    for aside in (Path(run_path) / "checkpoints").glob(f".step-*{_ASIDE}"):
        shutil.rmtree(aside, ignore_errors=True)
    for left in (Path(run_path) / "checkpoints").glob(".step-*.part"):
        if not left.name.endswith(f".{os.getpid()}.part"):
            shutil.rmtree(left, ignore_errors=True)
