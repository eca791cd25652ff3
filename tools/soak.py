"""`make soak`: a long run of a tiny model on the CPU with a fault every hundred steps, compared with an unbroken one.

    python tools/soak.py [--steps 2000] [--every 100] [--folder DIR]

A worker process trains with two targets and two drafters in threads through `train_run`, as a notebook does, and goes on
with `resume` after each fault. Kills end the worker, and the supervisor starts another. All other faults happen in one
process, whose memory, open files and threads must stay where they were. At the end the weights must be those of the
unbroken run bit for bit, and every step must be on record once.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from dflash.distributed.handover import HandOver  # noqa: E402
from dflash.distributed.threads import PipelineEngine  # noqa: E402
from dflash.launch.run import start_run, train_run  # noqa: E402
from dflash.launch.signals import graceful  # noqa: E402
from dflash.runs.control import RunControl  # noqa: E402
from dflash.runs.record import MetricsWriter, Run, read_metrics  # noqa: E402
from dflash.target.features import OnlineFeatures  # noqa: E402
from dflash.train.checkpoint import best_checkpoint, checkpoint_facts, checkpoints, latest_checkpoint  # noqa: E402
from dflash.train.prepare import prepare_data  # noqa: E402
from dflash.train.resume import SUPERSEDED  # noqa: E402
from dflash.train.settings import RunConfig  # noqa: E402
from dflash.train.step import Replica  # noqa: E402

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
GOES_ON = ("gradient not finite", "disk full in a save", "disk full in logging")  # without ending the session
HANG_SECONDS = 2.0


def fault_plan(steps: int, every: int) -> dict[int, str]:
    """step -> fault: kills first, so that what follows happens in one process."""
    at = list(range(every // 2, steps, every))
    kinds = [*KILLS, *(OTHERS[i % len(OTHERS)] for i in range(len(at)))]
    return dict(zip(at, kinds, strict=False))


def make_material(folder: Path, steps: int, every: int) -> dict[str, object]:
    """A random target, conversations, and the settings of the run."""
    from chat_tokenizer import chat_tokenizer, save_material
    from tiny_models import tiny_target

    tokenizer = chat_tokenizer()
    save_material(folder, tiny_target(vocab_size=len(tokenizer)).model, tokenizer)
    return dict(
        target=str(folder / "target"),
        data=str(folder / "data.jsonl"),
        pack_length=96,
        held_out=4,
        num_captured=2,
        drafter_layers=1,
        block_size=4,
        max_anchors=16,
        steps=steps,
        packs_per_step=2,
        dtype="float32",
        target_dtype="float32",
        lr=1e-3,
        features="online",
        soft_labels=True,
        gpus="cpu:2",
        target_gpus="cpu:2",
        checkpoint_every=max(2, every // 5),
        eval_every=2 * max(2, every // 5),
        watchdog_seconds=HANG_SECONDS,
    )


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


def work(folder: Path, steps: int, every: int, faults: bool) -> None:
    """Train to the end, whatever happens; the run is `folder`/runs/soak, or /whole without faults."""
    torch.set_num_threads(1)
    config = RunConfig.from_parameters(**json.loads((folder / "settings.json").read_text()))
    data, name = prepare_data(config), "soak" if faults else "whole"
    injector = Injector(fault_plan(steps, every), folder / "faults.txt" if faults else None)
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


def run_worker(folder: Path, steps: int, every: int, faults: bool) -> int:
    """Start workers until one ends by itself. Returns how many were killed. Raises RuntimeError for any other end."""
    killed = 0
    while True:
        command = [sys.executable, __file__, "--work", "--folder", str(folder), "--steps", str(steps), "--every", str(every)]
        log = open(folder / "worker.log", "ab")
        child = subprocess.Popen(
            command + ([] if faults else ["--whole"]),
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        log.close()
        code = child.wait()
        if code == 0:
            return killed
        if code != -signal.SIGKILL:
            raise RuntimeError(f"a worker ended with {code}:\n{(folder / 'worker.log').read_text()[-3000:]}")
        killed += 1


def orphans(folder: Path) -> int:
    """Workers of this soak that still live."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            found += b"--work" in words and str(folder).encode() in words
        except OSError:
            continue
    return found


def judge(folder: Path, steps: int, every: int, killed: int) -> dict[str, object]:
    """The counts, and `ok`."""
    plan, run, whole = fault_plan(steps, every), folder / "runs" / "soak", folder / "runs" / "whole"
    fired = [line.strip().split(" ", 1) for line in (folder / "faults.txt").open()]
    records = [r for r in read_metrics(run)[0]]
    seen = [r["step"] for r in records if r["kind"] == "step"]
    wanted = {r["step"]: r["loss"] for r in read_metrics(whole)[0] if r["kind"] == "step"}
    resumed = [r for r in records if r["kind"] == "resume"]
    sessions = [json.loads(line) for line in open(folder / "sessions-soak.jsonl")]
    last = [s for s in sessions if s["pid"] == sessions[-1]["pid"]]
    settled = last[min(2, len(last) - 1)]  # pools and caches are filled
    drift = last[-1]["memory"] / settled["memory"] - 1
    mine, theirs = (load_file(latest_checkpoint(r) / "drafter.safetensors") for r in (run, whole))
    best = best_checkpoint(run)
    lengths = {r["step"]: r["acceptance_length"] for r in records if r["kind"] == "eval"}
    saved = [r["step"] for r in records if r["kind"] == "checkpoint" and r["step"] in lengths]
    counts = {
        "steps": steps,
        "faults injected": len(fired),
        "faults survived": len(set(map(tuple, fired)) & {(str(at), kind) for at, kind in plan.items()})
        if seen and seen[-1] == steps
        else 0,
        "workers killed": killed,
        "sessions": len(sessions),
        "steps lost beyond the last checkpoint": len(set(wanted) - set(seen)),
        "steps on record twice": len(seen) - len(set(seen)),
        "losses that differ": sum(r["loss"] != wanted[r["step"]] for r in records if r["kind"] == "step"),
        "weights bit-equal to the unbroken run": all(torch.equal(mine[k], theirs[k]) for k in theirs),
        "best checkpoint kept": best is not None
        and checkpoint_facts(best)["acceptance_length"] == max(lengths[s] for s in saved),
        "resumes on record": len(resumed),
        "records set aside": len((run / SUPERSEDED).read_text().splitlines()),
        "memory drift": round(drift, 4),
        "sessions in one process": len(last),
        "open files": [settled["files"], last[-1]["files"]],
        "threads": [settled["threads"], last[-1]["threads"]],
        "orphan processes": orphans(folder),
    }
    counts["ok"] = bool(
        counts["faults injected"] == counts["faults survived"] == len(plan)
        and not counts["orphan processes"]
        and not counts["steps lost beyond the last checkpoint"]
        and not counts["steps on record twice"]
        and not counts["losses that differ"]
        and counts["weights bit-equal to the unbroken run"]
        and counts["best checkpoint kept"]
        and abs(drift) <= 0.02
        and last[-1]["files"] <= settled["files"]
        and last[-1]["threads"] <= settled["threads"]
    )
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100, help="steps between two faults")
    parser.add_argument("--folder", type=Path, help="keep the runs here; default: a temporary folder")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.folder, args.steps, args.every, not args.whole)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings.json").write_text(json.dumps(make_material(folder, args.steps, args.every)))
        began = time.monotonic()
        run_worker(folder, args.steps, args.every, faults=False)
        killed = run_worker(folder, args.steps, args.every, faults=True)
        counts = judge(folder, args.steps, args.every, killed)
        counts["seconds"] = round(time.monotonic() - began)
        for name, value in counts.items():
            print(f"{name:40} {value}")
    return 0 if counts["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
