"""Workers and ranks that die, hang or run out of memory, in every place."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from patience import PATIENCE, wait_until
from runner_jobs import drive_until_hang, options
from survival_lab import processes_of
from test_runner_threads import engine_of
from test_train_command import kinds, losses, material, start, wait_for_steps, write_config  # noqa: F401

from dflash.errors import worker_of
from dflash.launch.torchrun import child_environment, torchrun_command
from dflash.runs.record import Run
from dflash.train.checkpoint import latest_checkpoint
from dflash.train.memory_help import DeviceOutOfMemory
from dflash.train.settings import RunConfig
from dflash.train.step import Replica

HERE = Path(__file__).parent


# -- workers that die, hang or run out of memory ---------------------------------------------------------------------


class BrokenMetrics:
    """A record that fails when a worker writes to it."""

    def __init__(self, effect):
        self.effect = effect

    def write(self, kind, **fields):
        if threading.current_thread().name.startswith("target["):
            self.effect()


def place_fault(engine, place: str, effect) -> str:
    """Let `effect()` happen in one place of a running engine, from the third visit on; returns the worker's name."""
    visits = []

    def before(call):
        def wrapped(*arguments, **keywords):
            visits.append(1)
            if len(visits) >= 3:
                effect()
            return call(*arguments, **keywords)

        return wrapped

    if place == "target":
        engine.sources[0].get = before(engine.sources[0].get)
    elif place == "drafter":
        engine.replicas[1].accumulate = before(engine.replicas[1].accumulate)
    elif place == "copy":
        engine.warmup_jobs(engine.planner.step(1))  # makes the queue
        engine.hand_over._copy = before(engine.hand_over._copy)
    else:
        engine.target_ledgers[0].metrics = BrokenMetrics(effect)
    return "drafter[1]" if place == "drafter" else "target[0]"


PLACES = ["target", "copy", "drafter", "logging"]


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_that_dies_anywhere_ends_the_run_at_once(place):
    settings = options(steps=30)
    engine, plans = engine_of(2, 1, settings)

    def effect():
        raise OSError(f"a made-up end in {place}")

    worker = place_fault(engine, place, effect)
    with pytest.raises(OSError, match=f"a made-up end in {place}") as caught:
        try:
            engine.start(1)
            for step in range(1, 31):
                engine.step(plans.step(step), settings.lr)
        finally:
            engine.close()
    assert worker_of(caught.value) == worker
    assert not [t for t in threading.enumerate() if t.name.startswith(("drafter[", "target["))]


@pytest.mark.parametrize("place", PLACES[1:])  # the target's is in test_runner_threads
def test_a_worker_that_hangs_anywhere_is_ended_by_the_watchdog(tmp_path, place):
    settings, release = options(steps=30), threading.Event()
    engine, plans = engine_of(2, 1, settings)
    place_fault(engine, place, lambda: release.wait(PATIENCE))
    drive_until_hang(engine, plans, settings, tmp_path, release)
    assert "no step was completed" in (tmp_path / "failure.json").read_text()
    assert "in <lambda>" in (tmp_path / "stacks.txt").read_text(), "the stacks show where the worker hangs"


def test_out_of_memory_in_one_drafter_names_device_table_and_knobs(material, tmp_path, monkeypatch):  # noqa: F811
    config = write_config(material, tmp_path / "runs/oom", gpus="cpu:2", target_gpus="cpu:1")
    accumulate, calls = Replica.accumulate, []

    def exhausted(self, *arguments):
        calls.append(threading.current_thread().name)
        if calls[-1] == "drafter[1]" and calls.count("drafter[1]") == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 276.36 GiB.\nmore lines")
        return accumulate(self, *arguments)

    monkeypatch.setattr(Replica, "accumulate", exhausted)
    from dflash.launch.run import train_run

    run = Run.open(config.parent)
    with pytest.raises(DeviceOutOfMemory) as caught:
        train_run(run, RunConfig.load(config))
    text = str(caught.value)
    assert text.startswith("drafter[1] on cpu is out of memory: CUDA out of memory. Tried to allocate 276.36 GiB.\n")
    for wanted in (
        "memory of cpu (GiB)",
        "estimated: optimizer",
        "estimated in all",
        "max_anchors (now 16)",
        "pack_length (now 192)",
        "queue_depth (now 2)",
        "draft_vocab",
    ):
        assert wanted in text, wanted
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    fault = kinds(run.path)["fault"][0]
    assert (fault["worker"], fault["type"]) == ("drafter[1]", "DeviceOutOfMemory") and fault["message"] == text
    assert "in exhausted" in fault["traceback"]


# -- processes ------------------------------------------------------------------------------------------------------------


def test_ranks_of_a_killed_launcher_end_with_a_checkpoint(material, tmp_path):  # noqa: F811
    """A kernel that is killed must not leave ranks that train on."""
    config = write_config(
        material, tmp_path / "runs/orphans", gpus="cpu:2", target_gpus="cpu:1", launcher="torchrun", steps=100000
    )
    run, child = config.parent, start(config, tmp_path / "runs")
    wait_for_steps(run, 2, child)
    assert len(processes_of(config)) >= 3
    child.kill()
    child.wait()
    wait_until(lambda: not processes_of(config), "the end of orphans")
    end = kinds(run)["run_end"][-1]
    assert end["status"] == "interrupted" and latest_checkpoint(run).name.endswith(f"{end['step']:08d}")


@pytest.mark.slow
def test_a_signal_while_ranks_start_ends_the_run_after_its_first_step(material, tmp_path):  # noqa: F811
    config = write_config(
        material, tmp_path / "runs/early", gpus="cpu:2", target_gpus="cpu:1", launcher="torchrun", steps=2000
    )
    child = start(config, tmp_path / "runs")
    wait_until(lambda: len(processes_of(config)) >= 2, "the launcher and its torchrun")
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=PATIENCE)
    end = kinds(config.parent)["run_end"][-1]
    assert child.returncode == 130 and end["status"] == "interrupted" and end["step"] <= 2, output


@pytest.mark.parametrize(("number", "parallel"), [(signal.SIGTERM, "replicate"), (signal.SIGINT, "fsdp2")])
@pytest.mark.slow
def test_a_signal_to_every_process_of_a_job_is_one_wish(material, tmp_path, number, parallel):  # noqa: F811
    """As a container's stop or a batch system sends it; ranks get it from their torchrun once more."""
    config = write_config(
        material,
        tmp_path / "runs/all",
        gpus="cpu:2",
        target_gpus="cpu:1",
        launcher="torchrun",
        drafter_parallel=parallel,
        steps=100000,
    )
    run, child = config.parent, start(config, tmp_path / "runs")
    wait_for_steps(run, 3, child)
    for process in processes_of(config):
        os.kill(process, number)
    output, _ = child.communicate(timeout=PATIENCE)
    assert child.returncode == 128 + number and "Traceback" not in output, output
    end, steps = kinds(run)["run_end"], len(losses(run))
    assert len(end) == 1 and end[0]["status"] == "interrupted" and end[0]["step"] == steps
    assert latest_checkpoint(run).name.endswith(f"{steps:08d}") and "fault" not in kinds(run)
    log = (run / "torchrun.log").read_text()
    assert f"torchrun ends: {number.name}" in log and "Traceback" not in log


LISTENERS = """
import os
held = [os.readlink(f"/proc/{os.getppid()}/fd/{n}") for n in os.listdir(f"/proc/{os.getppid()}/fd")]
for kind in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{kind}").read().splitlines()[1:]:
        place, state, inode = (line.split()[i] for i in (1, 3, 9))
        if state == "0A" and f"socket:[{inode}]" in held:
            print("listens on", kind, place.partition(":")[0])
print("master", os.environ["MASTER_ADDR"], os.environ.get("GLOO_SOCKET_IFNAME"))
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's list of sockets")
def test_the_rendezvous_is_on_the_loopback_interface(tmp_path):
    """A rank looks at what the process that started it listens on."""
    (tmp_path / "look.py").write_text(LISTENERS)
    done = subprocess.run(
        torchrun_command(1, [str(tmp_path / "look.py")]),
        env=child_environment(),
        text=True,
        timeout=PATIENCE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    found = [line for line in done.stdout.splitlines() if line.startswith("listens on")]
    assert found and set(found) == {"listens on tcp 0100007F"}, done.stdout
    assert "master 127.0.0.1" in done.stdout
