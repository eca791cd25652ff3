"""Checkpoints that are whole or not there.

    runs/<id>/checkpoints/step-00000200/
        drafter.safetensors, drafter.json   the drafter alone, what decoding and export read
        trainer.pt                          float32 masters, moments, step; read with weights_only
        complete.json                       written last; names every file with its size

A checkpoint is written beside its final name, flushed to disk, marked complete and renamed. A folder without a true
mark is not a checkpoint, and is never trusted however new it is (vllm-project/speculators#739).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dflash.drafter_io import save_drafter
from dflash.errors import RunError
from dflash.model import DFlashDrafter

TRAINER = "trainer.pt"
MARK = "complete.json"
_NAME = re.compile(r"step-(\d{8})$")


def checkpoint_folder(run_path: str | Path, step: int) -> Path:
    return Path(run_path) / "checkpoints" / f"step-{step:08d}"


def save_checkpoint(run_path: str | Path, step: int, drafter: DFlashDrafter, target_name: str, state: Mapping[str, Any],
                    keep: int = 2, protect: int | None = None) -> Path:
    """Write the checkpoint of `step` and drop all but the newest `keep` complete ones.

    Args:
        state: what training needs to go on; plain values and tensors.
        protect: step of a checkpoint to keep whatever its age (the best so far).

    Raises: RunError when the disk refuses, with the older checkpoints untouched.
    """
    final = checkpoint_folder(run_path, step)
    beside = final.with_name(f".{final.name}.{os.getpid()}.part")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save_drafter(drafter, beside, target_name)
        torch.save({"step": step, **state}, beside / TRAINER)
        files = sorted(p for p in beside.iterdir() if p.is_file())
        for path in files:
            _flush(path)
        (beside / MARK).write_text(json.dumps({"step": step, "files": {p.name: p.stat().st_size for p in files}}))
        _flush(beside / MARK)
        _flush(beside)
        if final.exists():
            shutil.rmtree(final)
        beside.rename(final)
        _flush(final.parent)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise RunError(
            f"the checkpoint of step {step} could not be written to {final.parent}: {error}. Earlier checkpoints are "
            "untouched; make room and resume"
        ) from error
    prune(run_path, keep, protect)
    return final


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
    """The newest complete checkpoint. Raises RunError when there is none, naming incomplete ones."""
    complete = checkpoints(run_path)
    if complete:
        return complete[-1][1]
    torn = [p.name for p in (Path(run_path) / "checkpoints").glob("*") if p.is_dir()]
    more = f"; incomplete: {', '.join(sorted(torn))}" if torn else ""
    raise RunError(f"{run_path} holds no complete checkpoint{more}")


def load_trainer_state(folder: str | Path) -> dict[str, Any]:
    """`trainer.pt` of a complete checkpoint, on the CPU. Raises RunError for an incomplete one."""
    folder = Path(folder)
    if not is_complete(folder):
        raise RunError(f"{folder} is not a complete checkpoint; use the newest complete one of its run")
    return torch.load(folder / TRAINER, map_location="cpu", weights_only=True)


def prune(run_path: str | Path, keep: int, protect: int | None = None) -> None:
    """Delete complete checkpoints beyond the newest `keep`, and what a killed save left behind."""
    for step, path in checkpoints(run_path)[:-keep]:
        if step != protect:
            shutil.rmtree(path, ignore_errors=True)
    for left in (Path(run_path) / "checkpoints").glob(".step-*.part"):
        if not left.name.endswith(f".{os.getpid()}.part"):
            shutil.rmtree(left, ignore_errors=True)
