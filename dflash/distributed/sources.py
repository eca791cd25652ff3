"""A target for every target worker of a prepared job, and settings that a topology asks for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch

from dflash.devices import compute_dtype
from dflash.distributed.replicas import copy_target
from dflash.target.capture import Features, Target, load_target
from dflash.target.features import CachedFeatures, OnlineFeatures
from dflash.target.spread import shard_target
from dflash.train.prepare import Job
from dflash.train.settings import RunConfig
from dflash.train.step import FeatureSource
from dflash.train.topology import Topology


def on(device: torch.device):
    """Make a CUDA device the current one for a block, as kernels that are launched by hand need it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class OnDevice:
    """A source asked by a thread whose current device may be another one."""

    def __init__(self, source: FeatureSource, device: torch.device):
        self.source, self.device = source, device

    def get(self, pack) -> Features:
        with on(self.device):
            return self.source.get(pack)

    def close(self) -> None:
        self.source.close()


def make_sources(job: Job, topology: Topology) -> list[FeatureSource]:
    """A source for each target worker. Cached features are read by all of them; only what a cache does not hold needs
    a target of its own on every device."""
    if isinstance(job.source, CachedFeatures):
        view = copy.copy(job.source)  # the same cache, returned where it lies: the hand-over moves it
        view.device = None
        return [view] * len(topology.targets)
    targets = [job.target, *(_another(job, devices) for devices in topology.targets[1:])]
    return [OnlineFeatures(target, job.source.dtype, last_hidden=job.source.last_hidden) for target in targets]


def _another(job: Job, devices: tuple[torch.device, ...]) -> Target:
    """The job's target once more; one that is spread over devices is read again, as it cannot be copied as a whole."""
    if len(devices) == 1:
        return copy_target(job.target, devices[0])
    options = job.config.target
    target = load_target(
        options.target, "cpu", job.target.dtype, job.target.layer_ids, options.target_attention, self_test=False, fast=False
    )
    return shard_target(target, devices)


def fit_to(
    config: RunConfig,
    topology: Topology,
    say: Callable[[str], None] = lambda line: None,
    before: tuple[str, str] | None = None,
) -> RunConfig:
    """The config with what the topology decides: "auto" dtypes by the devices that compute, and at least one pack a step
    for each drafter, said out loud, since a drafter without packs only waits.

    Args:
        before: of a run that goes on, `resume.dtypes_before`: what "auto" came to then is kept, and a change is said.
    """
    asked = {
        "target_dtype": (config.target.target_dtype, topology.targets[0][0]),
        "dtype": (config.train.dtype, topology.drafters[0]),
    }
    decided = []
    for (name, (wanted, device)), was in zip(asked.items(), before or (None, None), strict=True):
        now = was if was and wanted == "auto" else str(compute_dtype(wanted, device)).removeprefix("torch.")
        if was and now != was:
            say(f"{name} is {now}, and the checkpoint was trained in {was}: the run goes on, but it is not the unbroken run")
        if was and wanted == "auto" and device.type != "cpu" and now == "float32":
            say(f"{name} stays float32, as the checkpoint was trained; {name}=bfloat16 is faster on {device}")
        decided.append(now)
    target, train = decided
    packs, drafters = config.train.packs_per_step, len(topology.drafters)
    if packs < drafters:
        say(f"packs_per_step {packs} leaves {drafters - packs} of {drafters} drafters idle; using {drafters}")
    return replace(
        config,
        target=replace(config.target, target_dtype=target),
        train=replace(config.train, dtype=train, packs_per_step=max(packs, drafters)),
    )
