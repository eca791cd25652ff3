"""The training loop: plan a step, run it, record it; evaluate, save and obey the buttons at step boundaries.

How a step is computed is an engine's business (`engine`).
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash.devices import Readback
from dflash.errors import DFlashError, RunError, ServerLostError
from dflash.train.holding import bytes_by_device
from dflash.train.optimizer import learning_rate
from dflash.train.plan import StepPlan
from dflash.train.settings import TrainOptions
from dflash.train.step import Engine, read_sums

if TYPE_CHECKING:
    from dflash.runs.control import RunControl
    from dflash.runs.record import Run


class NonFiniteParameterError(DFlashError):
    """A weight became NaN or infinite; training on would destroy the last good checkpoint's worth."""


@dataclass
class Outcome:
    """How training ended."""

    status: str  # "completed" or "interrupted"
    step: int
    skipped_steps: int
    acceptance_length: float | None  # held out, bonus token included


class Trainer:
    """Drives an engine through a run.

    Args:
        evaluate: gives the fields of an `eval` record, or None when nothing is held out.
        save: writes a checkpoint of a step and returns its path.
        beat: called after each completed step (the watchdog's).
    """

    def __init__(
        self,
        engine: Engine,
        options: TrainOptions,
        run: Run,
        control: RunControl,
        *,
        evaluate: Callable[[], dict] | None,
        save: Callable[[int], object],
        beat: Callable[[], None] = lambda: None,
    ):
        self.engine, self.options = engine, options
        self.run, self.control = run, control
        self._evaluate, self._save, self._beat = evaluate, save, beat
        self.total = options.steps  # planned steps; `max_minutes` may lower it
        self.skipped = 0
        self.acceptance: float | None = None  # of the newest evaluation
        self.evaluated: int | None = None  # its step
        self._pending: deque[tuple[StepPlan, float, Readback, float]] = deque()  # plan, lr, result, seconds
        self._clock = 0.0
        self._timed, self._counted = 0.0, 0  # seconds and number of the steps that tell the pace
        self._fit_at = _TIMED_STEPS  # the step that looks at it next
        self.done = 0  # completed steps

    def train(self, first_step: int = 1) -> Outcome:
        """Run steps `first_step` to the planned last one.

        A stop request and Ctrl-C (the notebook's stop button) end it after the last completed step, with a checkpoint. So
        does the loss of the target's server, which is then raised.
        """
        status = "completed"
        self.done = first_step - 1
        self.engine.start(first_step)
        if first_step == 1:
            self.evaluate(0)
        self._clock = time.perf_counter()
        try:
            while self.done < self.total and status == "completed":
                self._step(self.done + 1, first_step)
                if not self._at_boundary():
                    status = "interrupted"
        except KeyboardInterrupt:
            status = "interrupted"
        except ServerLostError:
            if self.options.checkpoint_every and self.done >= first_step:
                self.try_save(self.done)
            raise
        self._record(keep=0)
        if self.options.checkpoint_every:
            self.save(self.done)
        return Outcome(status, self.done, self.skipped, self.acceptance)

    def _step(self, step: int, first_step: int) -> None:
        """Run one step, and what is due after it."""
        began = time.perf_counter()
        plan = self.engine.planner.step(step)
        lr = learning_rate(step, self.total, *self.options.schedule_parts())
        result = Readback(self.engine.step(plan, lr))
        if self._pending:  # on a GPU: the step before this one has ended by now, or is waited for
            self._pending[-1][2].read()
        now = time.perf_counter()
        self._pending.append((plan, lr, result, now - self._clock))
        self._clock = now
        self.done = step
        self._record(keep=1 if self.engine.replica.device.type == "cuda" else 0)
        self._beat()
        if step > first_step:  # the first one of a process is slow
            self._timed, self._counted = self._timed + time.perf_counter() - began, self._counted + 1
        if self.options.max_minutes is not None and step >= self._fit_at and self._counted:
            self._fit_minutes(self._timed / self._counted)
        if step == first_step + 1:  # the moments are there, and nothing of a pass
            for device, parts in bytes_by_device(self.engine.named_tensors()).items():
                self.run.metrics.write("memory", device=device, step=step, parts=parts)
        if _due(step, self.options.eval_every) or step == self.total:
            self.evaluate(step)
        if _due(step, self.options.checkpoint_every) and step != self.total:
            self.try_save(step)

    def _at_boundary(self) -> bool:
        """Do what the buttons ask for between two steps; False when the run is to stop."""
        here = self.done
        going_on = self.control.at_step(
            checkpoint=lambda: self.try_save(here), evaluate=lambda: self.evaluate(here), heartbeat=self._beat
        )
        self._clock = time.perf_counter()  # a pause is no part of a step
        self._beat()
        return going_on

    def state_dict(self) -> dict:
        return {
            "asked": self.options.steps,
            "total": self.total,
            "skipped": self.skipped,
            "acceptance": self.acceptance,
            "evaluated": self.evaluated,
            "pace": [self._timed, self._counted, self._fit_at],
        }

    def load_state_dict(self, state: dict) -> None:
        if state["asked"] == self.options.steps:  # else more or fewer steps are wanted now
            self.total = state["total"]
            self._timed, self._counted, self._fit_at = state.get("pace", (0.0, 0, math.inf))
        else:
            self._fit_at = math.inf
        self.skipped, self.acceptance = state["skipped"], state["acceptance"]
        self.evaluated = state.get("evaluated")

    def acceptance_at(self, step: int) -> float | None:
        """Held-out acceptance length of the weights after `step`; None where they were not evaluated."""
        return self.acceptance if self.evaluated == step else None

    def evaluate(self, step: int) -> None:
        """Held-out acceptance length, as an `eval` record."""
        self._record(keep=0)
        if self._evaluate is None or not self.options.eval_every:
            return
        began = time.perf_counter()
        fields = self._evaluate()
        self.acceptance, self.evaluated = fields.get("acceptance_length"), step
        self.run.metrics.write("eval", step=step, **{"seconds": time.perf_counter() - began, **fields})
        self._clock = time.perf_counter()

    def save(self, step: int) -> None:
        """A checkpoint, as a `checkpoint` record."""
        self._record(keep=0)
        began = time.perf_counter()
        path = self._save(step)
        self.run.metrics.write("checkpoint", step=step, path=str(path), seconds=time.perf_counter() - began)
        self._clock = time.perf_counter()

    def try_save(self, step: int) -> None:
        """A checkpoint during training. A full disk is reported, and training goes on to the next checkpoint; only the last
        checkpoint of a run has to succeed."""
        try:
            self.save(step)
        except RunError as error:
            self._log(
                "error",
                f"{error}. Training goes on; the next checkpoint is due within {self.options.checkpoint_every} steps",
            )
            print(error, file=sys.stderr)

    def _log(self, level: str, message: str) -> None:
        self.run.metrics.write("log", worker="main", level=level, message=message)

    def _record(self, keep: int) -> None:
        """Write the `step` records whose results have arrived, all but the newest `keep`."""
        while len(self._pending) > keep:
            plan, lr, readback, seconds = self._pending.popleft()
            *sums, norm, finite = readback.read()
            fields = read_sums(sums)
            reason = _skip_reason(plan, fields["loss"], norm)
            self.skipped += reason is not None
            self.run.metrics.write(
                "step",
                step=plan.step,
                epoch=plan.items[-1].epoch,
                pack_ids=[i.pack.pack_id for i in plan.items],
                lr=lr,
                grad_norm=norm,
                tokens=plan.tokens,
                tokens_per_second=plan.tokens / seconds,
                step_seconds=seconds,
                skipped=reason is not None,
                reason=reason,
                **fields,
            )
            if reason is not None and plan.denominator > 0:
                self._log(
                    "warning",
                    f"step {plan.step} changed nothing: {reason}. Packs "
                    f"{[i.pack.pack_id for i in plan.items]}; their anchors follow from the settings and "
                    f"the step. Look at it: {self._replay(plan.step)}",
                )
            if not finite:
                names = [n for n, p in self.engine.replica.drafter.named_parameters() if p.requires_grad]
                bad = self.engine.replica.optimizer.first_non_finite(names)
                raise NonFiniteParameterError(
                    f"parameter {bad} is not finite after step {plan.step}; the run stops so that the last checkpoint "
                    "stays good. Resume from it with a lower lr or max_grad_norm, or replay the step: "
                    f"{self._replay(plan.step)}"
                )

    def _replay(self, step: int) -> str:
        return f"dflash replay --run {self.run.path} --step {step}"

    def _fit_minutes(self, seconds: float) -> None:
        """Plan as many steps as `max_minutes` holds at `seconds` a step, and look again in a twentieth of them: the schedule
        always has room to end."""
        first, fit = self._fit_at == _TIMED_STEPS, int(self.options.max_minutes * 60 / seconds)
        self.total = min(self.options.steps, max(fit, self.done + fit // _LOOKS))
        again = self.done + self.total // _LOOKS + 1
        self._fit_at = again if again < self.total - self.total // _LOOKS else math.inf
        self.run.metrics.write("plan", steps=self.total)
        if first and self.total < self.options.steps:
            self._log(
                "info",
                f"{self.options.max_minutes:g} minutes hold {self.total} of {self.options.steps} steps at "
                f"{seconds:.2f} s a step",
            )


def _due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens after this one."""
    return every > 0 and step % every == 0


_TIMED_STEPS = 12  # the first of them is not counted
_LOOKS = 20  # at the pace, in a run


def _skip_reason(plan: StepPlan, loss: float, norm: float) -> str | None:
    if plan.denominator <= 0:
        return "no supervised slot"
    if not (loss == loss and abs(loss) != float("inf")):
        return "loss is not finite"
    if not (norm == norm and abs(norm) != float("inf")):
        return "gradient is not finite"
    return None
