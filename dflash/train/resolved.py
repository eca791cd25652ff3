"""What a run came to, as `runs/<id>/resolved.yaml` holds it: the settings with every choice made, and the facts beside them.

`resolve` makes it, once; the start of a run, its threads and ranks, a resume, a replay, the report and the help for a full
device read it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from dflash.devices import dtype_named
from dflash.drafter import fast_path
from dflash.drafter.attention import default_backend
from dflash.drafter.config import DrafterConfig
from dflash.errors import ConfigError
from dflash.runs.record import RESOLVED_NAME
from dflash.target.loading import is_served
from dflash.target.random_weights import is_random
from dflash.train.memory import DeviceMemory
from dflash.train.settings import RunConfig
from dflash.train.topology import Topology, on_one


@dataclass(frozen=True)
class TargetFacts:
    """The target's identity and sizes, from its config and tokenizer alone."""

    name: str
    family: str
    layers: int
    hidden_size: int
    vocab_size: int
    end_ids: tuple[int, ...]

    @property
    def random(self) -> bool:
        return is_random(self.name)

    @property
    def served(self) -> bool:
        """Whether a vLLM server runs it."""
        return is_served(self.name)


@dataclass(frozen=True)
class ResolvedRun:
    """A config and what it came to.

    Args:
        asked: digest of the settings as they were given. gpus: CUDA devices that there were. nodes: machines.
        packs_asked: `packs_per_step` as it was given; `config` has at least one pack for each drafter.
        config: the settled settings. `attention` names a backend, `fast_capture` is False where it cannot be;
            `mask_token_id` is None where the text decides it, as `warm_start` is "auto" where the target's layers do.
        drafter: the shape; with `start_from` that drafter's. `draft_vocab_size` is None where the text decides it.
        fused: whether the drafter trains over the Triton kernels (`drafter.fast_path`).
        memory: what each device will hold; empty where it was not estimated.
        notes: what came out otherwise than asked, one sentence each.
        day: the date that chat templates write, as 2026-12-01: a run that goes on has the ids it began with. Empty: today's.
    """

    asked: str
    gpus: int
    nodes: int
    packs_asked: int
    config: RunConfig
    topology: Topology
    target: TargetFacts
    drafter: DrafterConfig
    fused: bool
    memory: Mapping[torch.device, DeviceMemory]
    notes: tuple[str, ...] = ()
    day: str = ""

    @property
    def layer_ids(self) -> list[int]:
        return list(self.config.target.target_layers)

    @property
    def target_dtype(self) -> torch.dtype:
        return dtype_named(self.config.target.target_dtype)

    @property
    def dtype(self) -> torch.dtype:
        """What the drafter computes in."""
        return dtype_named(self.config.train.dtype)

    def table(self) -> str:
        """A line a device, how that came about, and the notes."""
        return "\n".join([self.topology.table(self.memory), *self.notes])

    def on_one(self, device: torch.device) -> ResolvedRun:
        """The same run with target and drafter on one device, for a look at its steps elsewhere."""
        options, fused = self.config.drafter, fast_path.fits(device, self.drafter.head_dim)
        if device.type != self.topology.drafters[0].type:
            options = replace(options, attention=default_backend(device))
        config = replace(self.config, drafter=options)
        return replace(self, config=config, topology=on_one(device), fused=fused, memory={})

    def to_dict(self) -> dict[str, Any]:
        """Plain values that YAML can hold."""
        return {
            "asked": self.asked,
            "gpus": self.gpus,
            "nodes": self.nodes,
            "packs_asked": self.packs_asked,
            "devices": self.topology.to_dict(),
            "target": {**asdict(self.target), "end_ids": list(self.target.end_ids)},
            "drafter": self.drafter.to_dict(),
            "fused": self.fused,
            "memory": {str(device): {"have": m.have, "parts": m.parts} for device, m in self.memory.items()},
            "notes": list(self.notes),
            "day": self.day,
            "settings": self.config.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ResolvedRun:
        """Inverse of `to_dict`."""
        return cls(
            **{name: values[name] for name in ("asked", "gpus", "nodes", "packs_asked", "fused")},
            config=RunConfig.from_dict(values["settings"]),
            topology=Topology.from_dict(values["devices"]),
            target=TargetFacts(**{**values["target"], "end_ids": tuple(values["target"]["end_ids"])}),
            drafter=DrafterConfig.from_dict(values["drafter"]),
            memory={torch.device(name): DeviceMemory(m["parts"], m["have"]) for name, m in values["memory"].items()},
            notes=tuple(values["notes"]),
            day=values.get("day", ""),
        )

    def save(self, run_path: str | os.PathLike[str]) -> None:
        """Write `resolved.yaml`, whole or not at all."""
        path = Path(run_path) / RESOLVED_NAME
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))
        beside.replace(path)


def read_resolved(run_path: str | os.PathLike[str]) -> ResolvedRun | None:
    """What `resolved.yaml` of a run folder says; None where there is none that this version can read."""
    try:
        return ResolvedRun.from_dict(yaml.safe_load((Path(run_path) / RESOLVED_NAME).read_text()))
    except (OSError, yaml.YAMLError, KeyError, TypeError, ConfigError):
        return None
