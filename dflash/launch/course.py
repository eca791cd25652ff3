"""The way of every run, whichever engine takes its steps: prepare, warm up, train, finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from dflash.compile_safety import Protection, protected
from dflash.devices import one_host_thread
from dflash.evaluate.acceptance import evaluate_acceptance
from dflash.evaluate.samples import replayed_answer
from dflash.runs.control import RunControl
from dflash.runs.record import DeviceSampler, Run
from dflash.runs.sinks import open_sinks
from dflash.target.features import FeatureSource
from dflash.train.checkpoint import checkpoint_folder
from dflash.train.expected import expected_band
from dflash.train.loop import Outcome, Trainer
from dflash.train.prepare import Data, prepare_data, with_vocabulary
from dflash.train.resolved import ResolvedRun
from dflash.train.resume import same_plan, save_training
from dflash.train.step import Engine

Say = Callable[[str], None]


class Place(Protocol):
    """A process's part in a run: all of it, or a rank's."""

    leads: bool

    def sampled(self, resolved: ResolvedRun) -> list[str]:
        """Devices whose memory and load this process records."""

    def load_state(self, say: Say) -> dict:
        """The state of the checkpoint that the run goes on from."""

    def prepare(self, resolved: ResolvedRun, data: Data, first_step: int, say: Say) -> Engine:
        """Load this process's models and make its engine."""

    def close(self) -> None:
        """Stop the server that this process has started for the target; called on every way out."""


@dataclass
class Course:
    """One run on its way.

    Args:
        resolved: what the run came to. place: this process's part. say: gets each line of progress.
        data: what `prepare_data` gave, if it was already called.
    """

    run: Run
    resolved: ResolvedRun
    control: RunControl
    place: Place
    say: Say
    data: Data | None = None

    def take(self, resume: bool) -> Outcome | None:
        """Take the run to its end or a stop, and record that. None in a process that does not lead.

        Args:
            resume: go on from the run's newest complete checkpoint.
        """
        began = time.perf_counter()
        if self.place.leads:
            self.run.metrics.sinks += open_sinks(self.resolved.config.runtime.log_to, self.run)
        with ExitStack() as held:
            engine, state = self._prepare(resume, held)
            first_step = 1 if state is None else state["step"] + 1
            packs = self.data.held_out_packs
            held_out = engine.held_out_source(packs) if engine.leads and packs else None
            protection = held.enter_context(self._warm_up(engine, first_step))
            if not engine.leads:
                engine.start(first_step)
                engine.follow(protection.beat)
                return None
            trainer = self._trainer(engine, held_out, protection)
            self._go_on(trainer, state)
            outcome = trainer.train(first_step)
            engine.finish()
        self._finish(outcome, time.perf_counter() - began)
        return outcome

    def _prepare(self, resume: bool, held: ExitStack) -> tuple[Engine, dict | None]:
        """Data, models and engine; with the weights and moments of the checkpoint where there is one."""
        resolved, place = self.resolved, self.place
        devices = place.sampled(resolved)
        if devices:
            held.enter_context(DeviceSampler(self.run.metrics, devices))
        tell = self.say if place.leads else lambda line: None
        data = self.data = self.data or prepare_data(resolved)
        resolved = self.resolved = with_vocabulary(resolved, data)
        _each(tell, resolved.table())
        tell(f"{len(data.conversations)} conversations in {len(data.train_packs)} packs, {len(data.held_out)} held out")
        _each(tell, data.report.table())
        if place.leads:
            told = {"rows": data.report.rows, "left_out": data.report.unusable, "warnings": data.report.warnings}
            self.run.metrics.write("data", source=data.report.source, **told)
        state = place.load_state(self.say) if resume else None
        held.enter_context(one_host_thread(resolved.topology.devices))
        held.callback(place.close)
        engine = place.prepare(resolved, data, 1 if state is None else state["step"] + 1, self.say)
        held.callback(engine.close)
        if state is not None:
            engine.load_optimizer(state["optimizer"], checkpoint_folder(self.run.path, state["step"]))
        return engine, state

    @contextmanager
    def _warm_up(self, engine: Engine, first_step: int) -> Iterator[Protection]:
        """Compile on the first step's shapes, seal, and watch."""
        runtime = self.resolved.config.runtime
        with protected(
            engine.warmup_jobs(engine.planner.step(first_step)) if runtime.protect else (),
            run_dir=self.run.path if engine.leads else None,
            step_timeout=runtime.watchdog_seconds,
            on_hang=engine.on_hang,
        ) as protection:
            for done in protection.warmup.devices if protection.warmup else ():
                told = {"seconds": done.seconds, "graphs": done.graphs, "peak": done.peak_bytes}
                self.run.metrics.write("warmup", device=done.device, **told)
            for line in engine.capture(engine.planner.step(first_step)):
                self.say(line)
            yield protection

    def _trainer(self, engine: Engine, held_out: FeatureSource | None, protection: Protection) -> Trainer:
        config = self.resolved.config

        def evaluate() -> dict:
            with engine.whole() as drafter:
                packs = self.data.held_out_packs
                sample = replayed_answer(drafter, held_out, packs[0], self.data.tokenizer)
                return evaluate_acceptance(drafter, held_out, packs) | {"sample": sample}

        for device, memory in self.resolved.memory.items():
            self.run.metrics.write("memory", device=str(device), estimate=memory.parts)
        expected = expected_band(self.run.config, self.resolved.config.train.packs_per_step)
        if expected is not None:
            self.run.metrics.write("expected", **expected)
        trainer = Trainer(
            engine,
            config.train,
            self.run,
            self.control,
            evaluate=None if held_out is None else evaluate,
            save=lambda step: save_training(self.run, config, engine, trainer, step),
            beat=protection.beat,
        )
        return trainer

    def _go_on(self, trainer: Trainer, state: dict | None) -> None:
        """Put the trainer back to a checkpoint's state."""
        if state is None:
            return
        trainer.load_state_dict(state["trainer"])
        self.say(f"resuming after step {state['step']}")
        if (warning := same_plan(state, trainer.engine.planner)) is not None:
            self.say(warning)

    def _finish(self, outcome: Outcome, seconds: float) -> None:
        self.say(f"{outcome.status} after step {outcome.step}, {outcome.skipped_steps} steps skipped")
        self.run.end(
            outcome.status,
            step=outcome.step,
            acceptance_length=outcome.acceptance_length,
            seconds=seconds,
            skipped_steps=outcome.skipped_steps,
        )


def _each(say: Say, lines: str) -> None:
    for line in lines.splitlines():
        say(line)
