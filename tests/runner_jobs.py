"""A tiny training job for the runner's tests: packs, a target, a planner, replicas; the same on every call."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tiny_models import random_drafter, tiny_target

from dflash.compile_safety import HangError, protected
from dflash.data import Conversation, make_packs
from dflash.target.features import OnlineFeatures
from dflash.train.plan import Planner
from dflash.train.settings import RunConfig, TrainOptions
from dflash.train.step import Replica, SerialEngine

LENGTH = 64


def packs(count: int = 5, seed: int = 3):
    """`count` packs of two or three conversations each."""
    generator = torch.Generator().manual_seed(seed)
    conversations = []
    for index in range(count * 3):
        size = 18 + int(torch.randint(0, 4, (), generator=generator))
        ids = torch.randint(1, 60, (size,), generator=generator).tolist()
        conversations.append(Conversation(ids, [place >= 5 for place in range(size)], index))
    return make_packs(conversations, LENGTH, seed=0)[:count]


def options(**changes) -> TrainOptions:
    values = dict(
        steps=20,
        packs_per_step=4,
        lr=3e-3,
        warmup_steps=2,
        weight_decay=0.01,
        gamma=4.0,
        soft_labels=True,
        dtype="float32",
        eval_every=1000,
        checkpoint_every=1000,
        max_minutes=None,
    )
    return RunConfig.from_parameters("cpu", **values | changes).train


def planner(settings: TrainOptions, drafter, rows=None) -> Planner:
    return Planner(rows or packs(), settings, drafter.block_size, drafter.max_anchors)


def serial_engine(target, replica: Replica, settings: TrainOptions, source=None) -> SerialEngine:
    """The reference engine of a replica, over the job's packs."""
    return SerialEngine(replica, source or OnlineFeatures(target), planner(settings, replica.drafter))


def first_replica(settings: TrainOptions):
    """A target and the first replica of a drafter for it."""
    target = tiny_target()
    return target, Replica(random_drafter(target), settings)


def weights(replica: Replica) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in replica.drafter.parameters()])


def drive(engine, plans: Planner, settings: TrainOptions, steps: int | None = None) -> list[float]:
    """The losses of an engine's steps; it is started and closed."""
    losses = []
    try:
        engine.start(1)
        for step in range(1, (steps or settings.steps) + 1):
            losses.append(float(engine.step(plans.step(step), settings.lr)[0]))
    finally:
        engine.close()
    return losses


def drive_until_hang(engine, plans: Planner, settings: TrainOptions, run_dir: Path, release: threading.Event) -> None:
    """Steps under a watchdog of two seconds, of which one hangs until `release`: the caller has HangError."""
    try:
        with pytest.raises(HangError, match="no step was completed for 2 s"):
            with protected(run_dir=run_dir, step_timeout=2.0, on_hang=engine.on_hang) as protection:
                try:
                    engine.start(1)
                    for step in range(1, settings.steps + 1):
                        engine.step(plans.step(step), settings.lr)
                        protection.beat()
                finally:
                    release.set()
                    engine.close()
    finally:
        release.set()


def serial(settings: TrainOptions) -> tuple[list[float], torch.Tensor]:
    """Losses and final weights of the reference."""
    target, replica = first_replica(settings)
    engine = serial_engine(target, replica, settings)
    losses = drive(engine, engine.planner, settings)
    return losses, weights(replica)
