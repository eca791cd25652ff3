"""One process of the soak (test_soak.py): it trains with two targets and two drafters in threads through `train_run`, as a
notebook does, meets the faults of the plan, and goes on with `resume` after each.

    python soak_worker.py FOLDER STEPS EVERY soak|whole
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from dflash.distributed.handover import HandOver
from dflash.distributed.threads import PipelineEngine
from dflash.launch.run import start_run, train_run
from dflash.launch.signals import graceful
from dflash.runs.control import RunControl
from dflash.runs.record import MetricsWriter, Run
from dflash.target.features import OnlineFeatures
from dflash.train.checkpoint import checkpoints
from dflash.train.prepare import prepare_data
from dflash.train.resolve import resolve
from dflash.train.settings import RunConfig
from dflash.train.step import Replica

KILLS = ("kill in a save", "kill between steps", "kill in a save", "kill in a save")
OTHERS = (
    "target dies",
    "drafter dies",
    "copy dies",
    "drafter out of memory",
    "target hangs",
    "drafter hangs",
    "gradient not finite",
    "disk full in a save",
    "disk full in logging",
    "parameter not finite",
    "Ctrl-C",
    "SIGTERM",
)


def fault_plan(steps: int, every: int) -> dict[int, str]:
    """step -> fault: kills first, so that what follows happens in one process."""
    at = list(range(every // 2, steps, every))
    kinds = [*KILLS, *(OTHERS[i % len(OTHERS)] for i in range(len(at)))]
    return dict(zip(at, kinds, strict=False))


class Injector:
    """Puts each fault of the plan into the run once, at its step. A batch that is not finite is so at every visit, as
    it would be in an unbroken run."""

    def __init__(self, plan: dict[int, str], log: Path | None):
        self.plan, self.log = plan, log
        self.fired = [] if log is None or not log.exists() else [int(line.split()[0]) for line in log.open()]
        self.step, self.armed = 0, ""  # what the next call of its kind does
        self.release = threading.Event()
        self._install()

    def note(self, step: int) -> str:
        """The driving thread is about to do `step`."""
        self.step, kind = step, self.plan.get(step, "")
        if kind == "gradient not finite":
            self.armed = kind
        elif self.log is None or step in self.fired:
            kind = ""
        if kind and self.log is not None and step not in self.fired:
            self.fired.append(step)
            with open(self.log, "a") as file:
                file.write(f"{step} {kind}\n")
        return kind

    def take(self, *kinds: str) -> str:
        kind, self.armed = (self.armed, "") if self.armed in kinds else ("", self.armed)
        return kind

    def _install(self) -> None:
        step, get, copy, accumulate = PipelineEngine.step, OnlineFeatures.get, HandOver._copy, Replica.accumulate
        save, append = torch.save, MetricsWriter._append

        def faulty_step(engine, plan, lr):
            kind = self.note(plan.step)
            if kind == "kill between steps":
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "Ctrl-C":
                raise KeyboardInterrupt
            elif kind == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            elif kind == "parameter not finite":
                engine.replica.drafter.hidden_norm.weight.data[0] = float("nan")
            elif kind:
                self.armed = kind
            return step(engine, plan, lr)

        def faulty_get(source, pack):
            kind = self.take("target dies", "target hangs")
            if kind == "target dies":
                raise OSError("a made-up failure of the target")
            if kind:
                self.release.wait(60)
            return get(source, pack)

        def faulty_copy(queue, *arguments):
            if self.take("copy dies"):
                raise RuntimeError("a made-up failure of the copy")
            return copy(queue, *arguments)

        def faulty_accumulate(replica, item, features, denominator):
            kind = self.take("drafter dies", "drafter hangs", "drafter out of memory", "gradient not finite")
            if kind == "drafter dies":
                raise ValueError("a made-up failure of the drafter")
            if kind == "drafter out of memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 276.36 GiB (made up)")
            if kind == "drafter hangs":
                self.release.wait(60)
            if kind == "gradient not finite":
                features = type(features)(features.all_hidden_states * float("inf"), features.verifier_last_hidden)
            return accumulate(replica, item, features, denominator)

        def faulty_save(*arguments, **keywords):
            if self.take("disk full in a save"):
                raise RuntimeError("[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing file")
            if self.take("kill in a save"):
                delay = random.Random(self.step).uniform(0, 0.02)
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return save(*arguments, **keywords)

        def faulty_append(writer, data):
            if b'"kind":"stage"' in data and self.take("disk full in logging"):
                return writer._lost("made up: no space left on device")
            return append(writer, data)

        PipelineEngine.step, OnlineFeatures.get, HandOver._copy = faulty_step, faulty_get, faulty_copy
        Replica.accumulate, torch.save, MetricsWriter._append = faulty_accumulate, faulty_save, faulty_append


def usage() -> dict[str, int]:
    """Resident bytes, open files and threads of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def work(folder: Path, steps: int, every: int, name: str) -> None:
    """Train run `name` to its end, whatever happens; "whole" has no faults."""
    config = RunConfig.from_parameters(**json.loads((folder / "settings.json").read_text()))
    data = prepare_data(resolve(config))
    injector = Injector(fault_plan(steps, every), folder / "faults.txt" if name == "soak" else None)
    path = folder / "runs" / name
    if not path.exists():
        start_run(config, folder / "runs", name, data=data)
    done = False
    while not done:
        resume = bool(checkpoints(path))
        injector.release.clear()
        with Run.open(path) as run:
            control = RunControl(run.path, run.metrics)
            ending = ""
            with graceful(control, announce=False):
                try:
                    done = train_run(run, config, control, resume=resume, data=data).status == "completed"
                except Exception as error:
                    ending = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
                finally:
                    injector.armed = ""
                    injector.release.set()
        while any(t.name.startswith(("target[", "drafter[", "watchdog", "stop-request")) for t in threading.enumerate()):
            time.sleep(0.05)
        with open(folder / f"sessions-{name}.jsonl", "a") as file:
            file.write(json.dumps({"pid": os.getpid(), "step": injector.step, "ending": ending, **usage()}) + "\n")


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
