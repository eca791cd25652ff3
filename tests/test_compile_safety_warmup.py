"""Warmup leaves state bit-identical and nothing to compile; the watchdog ends a run that stands still."""

from __future__ import annotations

import importlib
import json
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from compile_helpers import clean_compiler
from patience import PATIENCE
from torch import nn

from dflash import compile_safety
from dflash.compile_safety import (
    HANG_EXIT_CODE,
    CompiledFunction,
    HangError,
    SealedRecompileError,
    WarmupError,
    WarmupJob,
    Watchdog,
)


@pytest.fixture(autouse=True)
def _clean_compiler():
    yield from clean_compiler()


class Replica:
    """A small model with everything that forward and backward may change: dropout, batch norm, gradients, a generator."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.generator = torch.Generator().manual_seed(3)
        self.forward = CompiledFunction(lambda x, w: torch.tanh(x @ w), "small", backend="aot_eager")

    def rehearse(self) -> torch.Tensor:
        x = torch.randn(4, 6, generator=self.generator)
        random.random()
        loss = self.model(self.forward(self.frozen(x), self.model[0].weight)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        return loss

    def step(self) -> torch.Tensor:
        loss = self.rehearse()
        self.optimizer.step()
        return loss

    def job(self, **kwargs) -> WarmupJob:
        return WarmupJob(
            **{
                "device": "cpu",
                "step": self.rehearse,
                "modules": [self.model, self.frozen],
                "generators": [self.generator],
                **kwargs,
            }
        )

    def state(self) -> list:
        tensors = [t.clone() for t in (*self.model.state_dict().values(), *self.frozen.state_dict().values())]
        tensors += [value.clone() for entry in self.optimizer.state.values() for value in entry.values()]
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return [tensors, grads, self.generator.get_state(), torch.get_rng_state(), random.getstate()]


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("resumed", [False, True])
def test_state_is_bit_identical_after_a_warmup(resumed):
    replica = Replica()
    if resumed:
        replica.step()
        replica.step()
    before = replica.state()
    with compile_safety.installed():
        report = compile_safety.warmup([replica.job()])
    assert same(replica.state(), before)
    assert bool(replica.optimizer.state) == resumed
    (entry,) = report.devices
    assert entry.graphs == (0 if resumed else 1)  # resumed: the two steps before have compiled it
    assert entry.warm_seconds > 0 and entry.peak_bytes > 1 << 20
    assert resumed or entry.seconds > entry.warm_seconds
    assert f"Warmup OK: loss={entry.loss:.2f}, mem=" in str(report)


def test_training_after_a_warmup_equals_training_without():
    losses = []
    for warm in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        replica = Replica()
        with compile_safety.installed():
            if warm:
                compile_safety.warmup([replica.job()])
            losses.append([replica.step().item() for _ in range(3)])
    assert losses[0] == losses[1]


def test_a_warmed_sealed_worker_thread_compiles_nothing():
    """What a launch relies on: warmed in the main thread, run in another, sealed."""
    replica, failed = Replica(), []

    def worker() -> None:
        try:
            for _ in range(3):
                replica.step()
        except Exception as error:
            failed.append(error)

    with compile_safety.protected([replica.job()]) as protection:
        assert compile_safety.is_sealed() and protection.warmup.devices[0].graphs == 1
        thread = threading.Thread(target=worker)
        thread.start()
        thread.join(PATIENCE)
        assert failed == []
        with pytest.raises(SealedRecompileError):
            replica.forward(torch.ones(5, 6), replica.model[0].weight)
    assert not compile_safety.is_sealed() and not compile_safety.is_installed()


def test_a_step_without_backward_is_no_warmup():
    replica = Replica()
    forward_only = replica.job(step=lambda: replica.model(torch.randn(4, 6)).sum())
    with compile_safety.installed():
        with pytest.raises(WarmupError, match="no backward"):
            compile_safety.warmup([forward_only])
        compile_safety.warmup([replica.job(step=forward_only.step, backward=False)])


def test_a_step_whose_shape_changes_cannot_be_sealed():
    replica, lengths = Replica(), iter(range(4, 20))
    job = replica.job(step=lambda: replica.forward(torch.ones(next(lengths), 6), replica.model[0].weight).sum().backward())
    before = replica.state()
    with compile_safety.installed(), pytest.raises(WarmupError, match="another compilation"):
        compile_safety.warmup([job])
    assert same(replica.state(), before)


def test_a_changed_frozen_parameter_is_reported():
    replica = Replica()

    def step() -> None:
        with torch.no_grad():
            replica.frozen.weight.add_(1.0)

    with pytest.raises(WarmupError, match="frozen tensor 'weight'"):
        compile_safety.warmup([replica.job(step=step, backward=False)])


def test_large_shared_tables_are_watched_not_copied(monkeypatch):
    module = importlib.import_module("dflash.compile_safety.warmup")  # the package has a function of this name
    monkeypatch.setattr(module, "MAX_COPIED_TABLE", 8)
    replica = Replica()
    replica.model.register_buffer("head", torch.zeros(6, 6), persistent=False)
    copied = module._save_modules([replica.model])
    assert [name for name, *_ in copied.frozen] == ["head"]
    with pytest.raises(WarmupError, match="'head'"):
        compile_safety.warmup([replica.job(step=lambda: replica.model.head.add_(1), backward=False)])


def test_state_comes_back_when_the_step_fails():
    replica = Replica()
    before = replica.state()

    def step() -> None:
        replica.rehearse()
        raise KeyError("no such pack")

    with compile_safety.installed(), pytest.raises(KeyError):
        compile_safety.warmup([replica.job(step=step)])
    assert same(replica.state(), before)


# -- watchdog ----------------------------------------------------------------------------------------------------------


def test_a_hang_is_raised_in_the_main_thread_with_all_stacks(tmp_path):
    told, stuck = [], threading.Event()

    def stuck_worker() -> None:
        stuck.wait(PATIENCE)

    thread = threading.Thread(target=stuck_worker, name="drafter-1", daemon=True)
    thread.start()
    with pytest.raises(HangError, match=r"no step was completed for 0\.5 s.*Compile gate: exclusive: nobody"):
        with Watchdog(tmp_path, seconds=0.5, on_hang=told.append):
            thread.join()  # a wait that nothing ends
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "drafter-1" in stacks and "stuck_worker" in stacks
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure["type"] == "HangError" and failure["message"] == told[0]
    stuck.set()


def test_beats_keep_a_run_alive_and_interrupts_still_work(tmp_path):
    with Watchdog(tmp_path, seconds=2.0) as watchdog:
        for _ in range(5):
            time.sleep(0.5)
            watchdog.beat()
    assert watchdog.reason is None and not (tmp_path / "stacks.txt").exists()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a script ignores it
    try:
        with pytest.raises(KeyboardInterrupt), Watchdog(tmp_path, seconds=PATIENCE):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_bound_of_zero_is_refused(tmp_path):
    with pytest.raises(ValueError, match="above 0"):
        Watchdog(tmp_path, seconds=0)


def test_a_main_thread_that_cannot_be_reached_ends_the_process(tmp_path):
    """The main thread ignores the signal, as native code would; the exit code says that it was a hang."""
    program = textwrap.dedent(f"""
        import signal, time
        from dflash.compile_safety import Watchdog
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        watchdog = Watchdog({str(tmp_path)!r}, seconds=0.3, grace=0.5).start()
        time.sleep(600)
    """)
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == HANG_EXIT_CODE and "no step was completed" in done.stderr
    assert (tmp_path / "stacks.txt").exists()
