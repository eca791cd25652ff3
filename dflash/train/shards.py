"""Shards of a drafter's float32 weights and moments on disk, by torch.distributed.checkpoint.

    step-00000200/shards/   __R_0.distcp of each drafter, .metadata

Every tensor is stored under "<kind>/<parameter name>" with its whole shape and the place of each shard, so what two
drafters wrote can be read by one, by three, or whole, for a run that does not shard.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.errors import RunError

FOLDER = "shards"
WEIGHTS = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")


def key(kind: str, name: str) -> str:
    """Under which a tensor is stored."""
    return f"{kind}/{name}"


def write(folder: Path, tensors: dict[str, Tensor], group: torch.distributed.ProcessGroup) -> None:
    """Write this process's shards; every process of the group calls it with the same names and folder.

    Raises: RunError on every process when one of them could not write.
    """
    import torch.distributed.checkpoint as dcp

    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), process_group=group)
    except dcp.CheckpointException as error:  # no Exception: nobody else would catch it
        raise RunError(f"shards could not be written to {folder}: {_first(error)}") from error


def read(folder: Path, tensors: dict[str, Tensor], group: torch.distributed.ProcessGroup | None = None) -> None:
    """Fill `tensors` in place: DTensors with this process's shards, together with all of `group`; or, with no group,
    whole tensors in a process of its own.

    Raises: RunError for a missing or torn file, and for names or shapes that are not those of the drafter.
    """
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(folder)
    try:
        stored = reader.read_metadata().state_dict_metadata
        _same_names(
            folder,
            {name: tuple(found.size) for name, found in stored.items()},
            {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked for
            dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as error:
        raise RunError(f"the shards in {folder} could not be read: {_first(error)}; take an earlier checkpoint") from error
    except OSError as error:
        raise RunError(f"the shards in {folder} could not be read: {error}; take an earlier checkpoint") from error


def read_whole(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The state of a `MasterAdamW` from shards, on the CPU.

    Args:
        about: what `ShardedAdamW.state_dict` said beside them.
    """
    import torch.distributed.checkpoint as dcp

    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(found.size, dtype=found.properties.dtype) for name, found in stored.items()}
    read(folder, tensors)
    names = about["names"]
    matrices = [name for name in names if tensors[key(WEIGHTS, name)].dim() > 1]
    ordered = [*matrices, *(name for name in names if name not in set(matrices))]  # the optimizer's groups
    moments = (
        {
            index: {"step": torch.tensor(about["adam_step"]), **{kind: tensors[key(kind, name)] for kind in MOMENTS}}
            for index, name in enumerate(ordered)
        }
        if about["adam_step"]
        else {}
    )
    return {
        "masters": [tensors[key(WEIGHTS, name)] for name in names],
        "adamw": {"state": moments, "param_groups": about["param_groups"]},
    }


def _same_names(folder: Path, got: dict[str, tuple], wanted: dict[str, tuple]) -> None:
    if wanted == got:
        return
    wrong = sorted(name for name in set(got) | set(wanted) if got.get(name) != wanted.get(name))
    one = wrong[0]
    raise RunError(
        f"the shards in {folder} are not of this drafter: {len(wrong)} tensors differ, first {one}: "
        f"{got.get(one, 'missing')}, wanted {wanted.get(one, 'none')}; resume with the run's own config"
    )


def _first(error: BaseException) -> str:
    """The first process's own error, without the stack of the others."""
    failures = getattr(error, "failures", {})
    rank = min(failures, default=None)
    return str(error) if rank is None else f"drafter {rank}: {failures[rank][0]!r}"
