"""A source of features for every target worker of this process."""

from __future__ import annotations

import copy

import torch

from dflash.devices import on
from dflash.distributed.replicas import copy_target
from dflash.target.capture import Features, Target
from dflash.target.features import CachedFeatures, FeatureSource, OnlineFeatures
from dflash.target.spread import shard_target
from dflash.train.prepare import Prepared, load_run_target
from dflash.train.topology import CPU


class OnDevice:
    """A source asked by a thread whose current device may be another one."""

    def __init__(self, source: FeatureSource, device: torch.device):
        self.source, self.device = source, device

    def get(self, pack) -> Features:
        with on(self.device):
            return self.source.get(pack)

    def close(self) -> None:
        self.source.close()


def make_sources(prepared: Prepared) -> list[FeatureSource]:
    """A source for each target worker. Cached features are read by all of them; only what a cache does not hold needs
    a target of its own on every device."""
    groups, source = prepared.resolved.topology.targets, prepared.source
    if isinstance(source, CachedFeatures):
        view = copy.copy(source)  # the same cache, returned where it lies: the hand-over moves it
        view.device = None
        return [view] * len(groups)
    targets = [prepared.target, *(_another(prepared, devices) for devices in groups[1:])]
    return [OnlineFeatures(target, source.dtype, last_hidden=source.last_hidden) for target in targets]


def _another(prepared: Prepared, devices: tuple[torch.device, ...]) -> Target:
    """The run's target once more; one that is spread over devices is read again, as it cannot be copied as a whole. A server
    is asked by all workers."""
    if prepared.resolved.target.served:
        return prepared.target
    if len(devices) == 1:
        return copy_target(prepared.target, devices[0])
    return shard_target(load_run_target(prepared.resolved, CPU, self_test=False), devices)
